"""The base of the options of hooks: a frozen dataclass for each hook.

It serves Python, YAML, the environment, flags and checkpoints. OmegaConf checks and converts each
value. Options have the names that torch's hooks use for their arguments.
"""

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, Union

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from commhooks.errors import HookConfigError, invalid, no_such

LATEST_DEFAULT_START = 1000
"""If the run's length is known, the default start is 10 % of it, but at most this step."""
START_IF_UNKNOWN = 100
"""The default start if the run's length is unknown."""
LARGEST_STEP = 2**62
"""The largest step number that a checkpoint can hold."""
ConfigT = TypeVar("ConfigT", bound="HookConfig")


@dataclass(frozen=True)
class DropIn:
    """Describes a function with a name and the arguments of torch's.

    Attributes:
        hook: the name of the hook to use if the function is passed without a state.
        check_state: raises HookConfigError if the function cannot be called with this state.
    """

    hook: str
    check_state: Callable[[object], None] = lambda state: None


DROP_INS: dict[Callable[..., Any], DropIn] = {}
"""`ddp_comm_hooks` adds its functions."""


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """Base of the config classes. Fields are bool, int, float, str, a list of str, or a union of
    these with None.

    With a field `exclude: list[str]`, the compressor does not see parameters whose names match one
    of its globs.
    """

    hook_name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Alternative names of the hook."""
    own_wire: ClassVar[str | None] = None
    """The dtype to which the hook itself casts gradients, as in the option `wrapper`: "fp16" or
    "bf16".
    """
    sends: ClassVar[bool] = True
    """False for a hook that communicates nothing. The replicas then drift apart."""
    averages_weights: ClassVar[bool] = False
    """True for a hook that averages weights once in several steps, in place of gradients. It needs
    no wrapper around the model.
    """
    kind: ClassVar[str] = "commhooks.hook.compressor_hook"
    """The module that runs the hook. It has a function `prepare`, with the arguments of
    `hook.kinds.prepared`, and is imported when it is used.
    """
    start_option: ClassVar[str | None] = None
    """Name of the field that holds the first compressed step. The field's value is an int for a
    number of steps, a float for a fraction of the run, or None for 10 % of the run (at most 1000
    steps; 100 steps if the run's length is unknown). Before this step gradients are averaged
    uncompressed.
    """
    without_use: ClassVar[tuple[str, ...]] = ()
    """Inherited options that this hook rejects or does not need. Lists of options omit them."""

    def __new__(cls: type[ConfigT], **options: Any) -> ConfigT:
        # The TypeError that `__init__` raises for an unknown keyword would not suggest a similar
        # name.
        names = [option.name for option in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                raise no_such(
                    f"hook {getattr(cls, 'hook_name', cls.__name__)!r}", "option", name, names
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Configs from Python and from YAML must compare equal across ranks. This also copies lists.
        hints = typing.get_type_hints(type(self))
        for option in dataclasses.fields(self):
            name = option.name
            value = converted(f"{type(self).__name__}: {name}", getattr(self, name), hints[name])
            object.__setattr__(self, name, value)
        if self.start_option is not None:
            self._check_start(self.start_option)
        self._require(all(self.excluded_globs), "exclude", "patterns that are not empty")

    @property
    def excluded_globs(self) -> Sequence[str]:
        patterns: Sequence[str] = getattr(self, "exclude", ())
        return patterns

    @property
    def configured_start(self) -> int | float | None:
        """The value of the field named by `start_option`; 0 if there is none."""
        return 0 if self.start_option is None else getattr(self, self.start_option)

    def with_start(self: ConfigT, start: int) -> ConfigT:
        if self.start_option is None:
            return self
        return dataclasses.replace(self, **{self.start_option: start})

    def resolved(self: ConfigT, total_steps: int | None) -> ConfigT:
        """Return a copy whose start is a number of steps.

        Args:
            total_steps: synchronised backward passes in the whole run; None if unknown.

        Raises:
            HookConfigError: the start is a fraction and `total_steps` is None.
        """
        start = self.configured_start
        if self.start_option is None or isinstance(start, int):
            return self
        if start is None:
            return self.with_start(
                START_IF_UNKNOWN
                if total_steps is None
                else min(LATEST_DEFAULT_START, math.ceil(0.1 * total_steps))
            )
        if total_steps is None:
            raise HookConfigError(
                f"{self.start_option}={start!r} is a fraction of the run, whose length is unknown"
                f" here: pass total_steps=N, or give {self.start_option} as an int, a number of"
                " steps"
            )
        return self.with_start(math.ceil(start * total_steps))

    def _check_start(self, name: str) -> None:
        start = getattr(self, name)
        if isinstance(start, int):
            self._require(start >= 0, name, "a number of steps, 0 or more")
            self._require(start <= LARGEST_STEP, name, f"a number of steps, {LARGEST_STEP} at most")
        elif start is not None:
            self._require(
                0 < start < 1,
                name,
                "a fraction of the run strictly between 0 and 1, or an int for a number of steps",
            )

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise invalid(f"{type(self).__name__}: {name}", getattr(self, name), expected)


def converted(where: str, value: Any, hint: Any, expected: str = "") -> Any:
    """Convert `value` to the type `hint` as OmegaConf does, or raise HookConfigError.

    Text for a number or bool is parsed as YAML, because the environment and flags pass text.
    Numbers and bools of numpy are taken as Python's. An int for a bool is an error, although
    OmegaConf would convert it.

    Args:
        where: argument, key path or option, for the message.
        hint: bool, int, float, str, list[str], dict[str, Any], or a union of these with None.
        expected: the expected value in words, for the message; "": the type.
    """
    value = as_python(plain(where, value))
    kinds = _members(hint)
    try:
        read = list(value) if isinstance(value, tuple) else value  # OmegaConf 2.3 takes no tuple
        if isinstance(value, str) and value.strip() and not {bool, int, float}.isdisjoint(kinds):
            read = OmegaConf.from_dotlist([f"value={value}"]).value
        if type(read) in kinds:
            return read
        if bool in kinds:
            raise TypeError
        holder = OmegaConf.structured(_holder(hint))
        OmegaConf.update(holder, "value", read)
        return plain(where, holder.value)
    except Exception:  # OmegaConf and PyYAML raise many types, also OverflowError and UnicodeError
        raise invalid(where, value, expected or " or ".join(map(_in_words, kinds))) from None


def as_python(value: Any) -> Any:
    """Return a scalar of numpy, such as `np.int64(2)`, as Python's; anything else as it is."""
    numpy = sys.modules.get("numpy")  # if nobody has imported it, `value` is not of it
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def check_choice(where: str, value: object, choices: Collection[object]) -> None:
    if value not in choices:
        near = [choice for choice in choices if isinstance(choice, str)]
        raise invalid(where, value, f"one of {', '.join(map(repr, choices))}", near)


def plain(where: str, value: Any) -> Any:
    """Convert an OmegaConf container, such as Hydra passes, to a dict or list.

    Raises HookConfigError if a value is missing ("???") or an interpolation cannot be resolved.
    `where`: argument, key path or file, for the message.
    """
    if not OmegaConf.is_config(value):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise HookConfigError(f"{where}: {error.full_key}: {str(error).splitlines()[0]}") from error


@functools.cache
def _holder(hint: Any) -> type[Any]:
    """Make a dataclass with one field of this type. OmegaConf (2.4) cannot convert to `int | float
    | None` itself.
    """
    return dataclasses.make_dataclass("Value", [("value", Union[_members(hint)])])  # noqa: UP007


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _in_words(kind: Any) -> str:
    words = {
        bool: "True or False",
        type(None): "None",
        list[str]: "a list of text",
        dict[str, Any]: "a dict",
    }
    return words.get(kind) or str(kind.__name__)
