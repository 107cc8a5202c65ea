"""The option `exclude`: globs on parameter names (`fnmatch`, case-sensitive)."""

import difflib
import fnmatch
from collections.abc import Sequence

import torch

from commhooks.errors import logger_of

logger = logger_of(__name__)


def matching(names: Sequence[str], patterns: Sequence[str]) -> str | None:
    """The first of `patterns` that matches one of a parameter's `names` (a tied parameter has several); else None."""
    return next((each for each in patterns if any(fnmatch.fnmatchcase(name, each) for name in names)), None)


def own_name(name: str) -> str:
    """`name` without the prefix that `torch.compile` adds, so that checkpoints fit with and without it."""
    return name.replace("_orig_mod.", "")


def all_names(module: torch.nn.Module) -> dict[int, list[str]]:
    """id of each parameter -> all of its names in registration order, without `torch.compile`'s prefix."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(own_name(name))
    return names


def unmatched_sentence(patterns: Sequence[str], names: Sequence[str]) -> str | None:
    """A warning about patterns that match none of the parameter `names`; None if every pattern matches one."""
    parts = []
    for pattern in patterns:
        if matching(names, [pattern]) is None:
            near = difflib.get_close_matches(pattern.strip("*?"), names, n=1, cutoff=0.0)
            parts.append(f"{pattern!r}" + (f" (the closest name is {near[0]!r})" if near else ""))
    if not parts:
        return None
    return (
        f"exclude: no parameter of the model matches {', '.join(parts)}. Patterns are compared with whole names, case "
        "matters, and * stands for anything"
    )


def warn_if_unmatched(patterns: Sequence[str], module: torch.nn.Module) -> None:
    """Log one warning about patterns that match no parameter of `module`, frozen ones included."""
    sentence = unmatched_sentence(patterns, [name for names in all_names(module).values() for name in names])
    if sentence is not None:
        logger.warning("%s.", sentence)
