"""`commhooks hooks`: list all hooks with their options."""

import argparse

from commhooks.comm.wire import WIRE_DTYPES
from commhooks.compressors.hook_config import explained_options
from commhooks.registry import COMPRESSORS, aliases, available_hooks


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    # One option per line, so that each can be copied.
    table = Table(show_lines=True)
    table.add_column("hook", no_wrap=True)
    table.add_column("what it does, and options with their defaults")
    short = {name: alias for alias, name in aliases().items()}
    for name, hook in available_hooks().items():
        lines = [hook["description"]]
        explained = explained_options(COMPRESSORS[name].Config) if name in COMPRESSORS else {}
        for option, text in explained.items():
            lines += [f"  {option}={hook['options'][option]!r}", f"      {text}".rstrip()]
        table.add_row(f"{name}\n({short[name]})" if name in short else name, "\n".join(filter(None, lines)))
    unwrapped = " and ".join(name for name, each in COMPRESSORS.items() if not each.wrappers)
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(table)
    console.print(
        "Case, _ and - in names do not matter; names in parentheses are short forms. Every hook, but for "
        f"{unwrapped}, can be had with wrapper={' or '.join(map(repr, WIRE_DTYPES))}, which halves what it sends. "
        "A hook of your own is given as 'package.module:function'; 'none' is training without a hook."
    )
    return 0
