"""The nine arguments that the front ends have in common, each once: `commhooks.attach`, the strategies of Lightning and
Fabric, the handler and the YAML of Accelerate, flags. Their signatures repeat names and defaults for editors and
jsonargparse; a test compares them with this table. The docstring of `attach` explains them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.compressors.plain_values import as_type
from commhooks.errors import did_you_mean, invalid

WRAPPERS = ("fp16", "bf16")
SAVE_RESIDUAL = ("mean", "per_rank", "drop")


@dataclass(frozen=True)
class Argument:
    """An argument.

    Attributes:
        kind: its type in YAML. In Python `hook` and `hook_state` may be other objects, too.
        default: if nothing is given. Lightning writes one file for all ranks, so that its `save_residual` is "mean".
        choices: the values, if there are few.
    """

    kind: Any
    default: Any = None
    choices: tuple[str | None, ...] = ()


ARGUMENTS = {
    "hook": Argument(str),
    "hook_options": Argument(dict[str, Any] | None),
    "hook_state": Argument(str | None),
    "wrapper": Argument(str | None, choices=(None, *WRAPPERS)),
    "save_residual": Argument(str, "per_rank", choices=SAVE_RESIDUAL),
    "strict": Argument(bool, True),
    "total_steps": Argument(int | None),
    "check_every": Argument(int | None),
    "ranks_per_node": Argument(int | str | None),
}
_EXPECTED = {
    bool: "True or False",
    int | None: "a number of steps, 1 or more, or None",
    int | str | None: "'auto', a number of ranks, 1 or more, or None",
}


def check_arguments(given: Mapping[str, object]) -> None:
    """Check the values of those of the arguments that are given.

    Raises:
        HookConfigError: one is of the wrong type or out of range.
    """
    for name, argument in ARGUMENTS.items():
        if name in given and argument.choices:
            check_choice(name, given[name], argument.choices)
        elif name in given and argument.kind in _EXPECTED:
            check_value(name, given[name], argument.kind)


def check_value(name: str, value: Any, kind: Any, expected: str = "") -> None:
    """Raise HookConfigError unless `value`, of the argument `name`, is of the type `kind`; a number must be 1 or more,
    and the only text is "auto"."""
    try:
        fits = isinstance(value, bool) or (value == "auto" if isinstance(value, str) else value is None or value >= 1)
        as_type(value, kind)
    except TypeError:
        fits = False
    if not fits:
        raise invalid(name, value, expected or _EXPECTED[kind])


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise HookConfigError unless `value`, of the argument `name`, is one of `choices`."""
    if value not in choices:
        near = (
            did_you_mean(value, [each for each in choices if isinstance(each, str)]) if isinstance(value, str) else ""
        )
        raise invalid(name, value, f"one of {', '.join(map(repr, choices))}{near}")
