"""The nine arguments that the front ends have in common, each once: `commhooks.attach`, the strategies of Lightning and
Fabric, the handler and the YAML of Accelerate, flags. Their signatures repeat names and defaults for editors and
jsonargparse; a test compares them with this table. What each means in full, the docstring of `attach` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commhooks.compressors.plain_values import as_type
from commhooks.errors import HookConfigError, closest

WRAPPERS = ("fp16", "bf16")
SAVE_RESIDUAL = ("mean", "per_rank", "drop")


@dataclass(frozen=True)
class Argument:
    """An argument.

    Attributes:
        kind: its type in YAML. In Python `hook` and `hook_state` may be other objects, too.
        help: one line for a flag, with the default.
        default: if nothing is given. Lightning writes one file for all ranks, so that its `save_residual` is "mean".
        choices: the values, if there are few.
    """

    kind: Any
    help: str
    default: Any = None
    choices: tuple[str | None, ...] = ()


ARGUMENTS = {
    "hook": Argument(str, "which hook, e.g. powerSGD: `commhooks hooks` lists them; none is DDP without a hook"),
    "hook_options": Argument(dict[str, Any] | None, "options of the hook, e.g. matrix_approximation_rank=4"),
    "hook_state": Argument(str | None, "state of a function of yours, as package.module:name (none)"),
    "wrapper": Argument(str | None, "what is made of the numbers that are sent (nothing)", choices=(None, *WRAPPERS)),
    "save_residual": Argument(
        str,
        "which residuals save_state writes: of each rank, their mean, or none (per_rank)",
        "per_rank",
        choices=SAVE_RESIDUAL,
    ),
    "strict": Argument(bool, "whether loading the state of another hook or model is an error (true)", True),
    "total_steps": Argument(
        int | None, "synchronised backward passes in the whole run, for a start that is a fraction of it"
    ),
    "check_every": Argument(
        int | None, "compare the weights of all ranks before every so many backward passes (never)"
    ),
    "ranks_per_node": Argument(
        int | str | None, "average exactly inside a node of so many ranks, or `auto`; compress between nodes (no)"
    ),
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
        raise HookConfigError(f"{name}={value!r}; expected {expected or _EXPECTED[kind]}")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise HookConfigError unless `value`, of the argument `name`, is one of `choices`."""
    if value not in choices:
        offer = closest(value, [each for each in choices if isinstance(each, str)]) if isinstance(value, str) else ""
        raise HookConfigError(f"{name}={value!r}{offer}; expected one of {', '.join(map(repr, choices))}")
