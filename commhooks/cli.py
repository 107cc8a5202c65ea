"""The `commhooks` command."""

import argparse

import commhooks
from commhooks.spec import ALIASES
from commhooks.wire import WIRE_DTYPES


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="commhooks", description="Communication hooks for DistributedDataParallel: compressed gradients."
    )
    parser.add_argument("--version", action="version", version=f"commhooks {commhooks.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("hooks", help="list the hooks and their options")
    if parser.parse_args(arguments).command is None:
        parser.print_help()
    else:
        _print_hooks()
    return 0


def _print_hooks() -> None:
    from rich.console import Console
    from rich.table import Table

    # One option per line: they are words to be copied.
    table = Table(show_lines=True)
    table.add_column("hook", no_wrap=True)
    table.add_column("what it does, and options with their defaults")
    short = {name: alias for alias, name in ALIASES.items()}
    for name, hook in commhooks.available_hooks().items():
        lines = [hook["description"], *(f"  {option}={default!r}" for option, default in hook["options"].items())]
        table.add_row(f"{name}\n({short[name]})" if name in short else name, "\n".join(lines))
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(table)
    console.print(
        "Case, _ and - in names do not matter; names in parentheses are short forms. Every hook can be had with "
        f"wrapper={' or '.join(map(repr, WIRE_DTYPES))}, which halves what it sends. "
        "A hook of your own is given as 'package.module:function'."
    )
