"""Runs or checks the snippets that `doc_snippets.py` finds."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.doc_snippets import Snippet, WrongSnippet, versions
from tests.support.snippet_commands import check_command, commands
from tests.support.snippet_python import execute, run_script
from tests.support.snippet_yaml import check_yaml


def check(snippet: Snippet, run_ranks: Callable[..., list[Any]], folder: Path) -> None:
    """Runs or checks one snippet in the empty `folder`; raises where it is wrong."""
    if snippet.language in ("python", "diff"):
        *old, new = versions(snippet)
        for index, version in enumerate([*old, new]):
            place = folder / str(index)
            place.mkdir()
            if snippet.needs == "lightning notebook":
                _compare(snippet, run_script(version, place, ""))
            elif snippet.needs == "lightning" and version == new:
                _compare(snippet, run_script(version, place))
                if 'ckpt_path="last"' in version and "resumed at step" not in run_script(version, place):
                    raise WrongSnippet(f"{snippet}: the second run does not continue\n{version}")
            else:
                chain = [*_chain_above(snippet), (str(snippet), version)]
                needs = _first(snippet).needs + (" ranks" if snippet.needs == "lightning" else "")
                if needs.startswith("transformers"):
                    pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")
                ranks = 4 if needs.endswith(" sharded") else 2
                run_ranks(execute, chain, needs, str(place), world_size=ranks, timeout_s=90)
    elif snippet.language == "yaml":
        check_yaml(snippet.text, folder)
    elif snippet.language == "bash":
        for command in commands(snippet.text):
            check_command(command)


def _compare(snippet: Snippet, printed: str) -> None:
    """The kernel depends on the machine, and is not compared."""

    def without_kernel(text: str) -> str:
        return re.sub(r"; [^;)]* kernel", "", text)

    for line in snippet.output.splitlines():
        if without_kernel(line) not in without_kernel(printed):
            raise WrongSnippet(f"{snippet} does not print {line!r}, but\n{printed}")


def _first(snippet: Snippet) -> Snippet:
    return _first(snippet.above) if snippet.above is not None else snippet


def _chain_above(snippet: Snippet) -> list[tuple[str, str]]:
    if snippet.above is None:
        return []
    return [*_chain_above(snippet.above), (str(snippet.above), versions(snippet.above)[-1])]
