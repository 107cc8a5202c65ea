"""`commhooks hooks`: list all hooks with their options."""

import argparse
import dataclasses
import inspect
import re

from commhooks.comm.wire import WIRE_DTYPES
from commhooks.options import HookConfig
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


def explained_options(config: type[HookConfig]) -> dict[str, str]:
    """Option -> the first sentence about it in the docstring of the class or its nearest base; "" without one. Without
    the options of no use."""
    found: dict[str, str] = {}
    for each in config.__mro__:
        found = _argument_entries(each.__doc__) | found
    names = [each.name for each in dataclasses.fields(config) if each.name not in config.without_use]
    return {name: found.get(name, "").partition(". ")[0].rstrip(".") for name in names}


def _argument_entries(doc: str | None) -> dict[str, str]:
    """Argument -> its entry under "Args:" in a docstring, in one line."""
    section = inspect.cleandoc(doc or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
