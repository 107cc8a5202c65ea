"""The `commhooks` command."""

import argparse

import commhooks


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="commhooks", description="Communication hooks for DistributedDataParallel: compressed gradients."
    )
    parser.add_argument("--version", action="version", version=f"commhooks {commhooks.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("hooks", help="list the hooks and their options")
    parser.parse_args(arguments)
    _print_hooks()
    return 0


def _print_hooks() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("hook", "what it does", "options and defaults"):
        table.add_column(column, overflow="fold")
    for name, hook in commhooks.available_hooks().items():
        options = "\n".join(f"{option}={default!r}" for option, default in hook["options"].items())
        table.add_row(name, hook["description"], options)
    Console().print(table)
