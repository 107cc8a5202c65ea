"""The `commhooks` command. Each subcommand is a separate module, listed in `COMMANDS` of `arguments.py`."""

import argparse
import importlib
import os
import re
import sys
from contextlib import suppress

import commhooks
from commhooks.errors import CommHookError, did_you_mean
from commhooks.tools.arguments import COMMANDS


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser, parsers = _parsers()
    given = sys.argv[1:] if arguments is None else arguments
    parsed, unknown = parser.parse_known_args(given)
    if unknown:
        if parsed.command is None:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        parsers[parsed.command].error(_about_unknown(unknown[0], parsed.command, parsers[parsed.command]))
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        status: int = importlib.import_module(COMMANDS[parsed.command].module).run(parsed)
        sys.stdout.flush()
        return status
    except CommHookError as error:
        print(f"commhooks {parsed.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has closed the pipe, as in `commhooks plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports it again at exit
        return 1


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of the subcommands. None takes abbreviations: `--rank` must not mean `--ranks-per-node`."""
    parser = argparse.ArgumentParser(
        prog="commhooks",
        description="Communication hooks for DistributedDataParallel: compressed gradients.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"commhooks {commhooks.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(parsers[name])
    with suppress(ImportError):  # argcomplete is optional
        import argcomplete

        argcomplete.autocomplete(parser)  # does nothing unless a shell asks for completions
    return parser, parsers


def _about_unknown(argument: str, command: str, parser: argparse.ArgumentParser) -> str:
    """The message about an argument that a subcommand does not have."""
    flag = argument.partition("=")[0]
    flags = re.findall(r"--[\w-]+", parser.format_usage())
    if not flag.startswith("-"):
        return f"unrecognized arguments: {argument}"
    if flag in flags:
        return f"write {flag} behind the command: commhooks {command} ... {flag}"
    return f"there is no flag {flag}{did_you_mean(flag, flags)}"
