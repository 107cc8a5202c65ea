"""The `commhooks` command. Each subcommand is a separate module, listed in `COMMANDS`."""

import argparse
import os
import sys
from typing import Protocol

import commhooks
from commhooks.errors import CommHookError
from commhooks.tools import hooks_command, plan_command
from commhooks.tools.doctor import command as doctor_command
from commhooks.tools.inspect import command as inspect_command


class Command(Protocol):
    """The interface of a module that implements a subcommand."""

    HELP: str
    """One line for the list of commands."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments; `parser.description` may be set too."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the subcommand and return the exit status. A `CommHookError` becomes one line on stderr and status 1."""


COMMANDS: dict[str, Command] = {
    "hooks": hooks_command,
    "plan": plan_command,
    "doctor": doctor_command,
    "inspect": inspect_command,
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="commhooks", description="Communication hooks for DistributedDataParallel: compressed gradients."
    )
    parser.add_argument("--version", action="version", version=f"commhooks {commhooks.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(subparsers.add_parser(name, help=command.HELP, description=command.HELP))
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        status = COMMANDS[parsed.command].run(parsed)
        sys.stdout.flush()
        return status
    except CommHookError as error:
        print(f"commhooks {parsed.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe, as in `commhooks plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports it again at exit
        return 1
