"""Configuration: one frozen dataclass per hook. The same definition serves Python, YAML (as an OmegaConf structured
config), `--help` and checkpoints. Fields have the names of the arguments of torch's hooks."""

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from commhooks.compressors.plain_values import checked, plain
from commhooks.errors import HookConfigError, invalid, no_such

LATEST_DEFAULT_START = 1000
"""The default start in a run of known length: 10 % of it, and no later than this step."""
START_IF_UNKNOWN = 100
"""The default start in a run of unknown length."""
LARGEST_STEP = 2**62
"""The largest step number that a checkpoint can hold."""
ConfigT = TypeVar("ConfigT", bound="HookConfig")


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """Base of the config classes. Fields are bool, int, float, str, a list of str, or a union of these with None.

    A field `exclude: list[str]` holds globs on parameter names: what matches is never offered to the compressor.
    """

    hook_name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Alternative names of the hook."""
    own_wire: ClassVar[str | None] = None
    """The dtype to which the hook itself casts gradients, spelled as the option `wrapper`: "fp16" or "bf16"."""
    sends: ClassVar[bool] = True
    """False for a hook that communicates nothing, so that replicas drift apart."""
    start_option: ClassVar[str | None] = None
    """Name of the field with the step at which compression begins: an int is a number of steps, a float a fraction of
    the run, None 10 % of it (at most 1000 steps), and 100 steps where its length is unknown. Before that step gradients
    are averaged uncompressed."""
    without_use: ClassVar[tuple[str, ...]] = ()
    """Inherited options that this hook refuses or does not need: lists of options leave them out."""

    def __new__(cls: type[ConfigT], *args: Any, **kwargs: Any) -> ConfigT:
        # An unknown keyword argument would end in a TypeError of `__init__` that offers nothing.
        known = inspect.signature(cls.__init__).parameters.values()
        names = [each.name for each in known][1:]
        if not any(each.kind is each.VAR_KEYWORD for each in known):
            for name in kwargs:
                if name not in names:
                    raise no_such(cls.__name__, "option", name, names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Check types as strictly as YAML does (a dataclass accepts any type), and convert as YAML does, so that
        # configurations from Python and YAML compare equal across ranks. Copy: the caller may change its list later.
        for name, hint in _hints(type(self)).items():
            value = plain(f"{type(self).__name__}: {name}: ", getattr(self, name))
            object.__setattr__(self, name, checked(f"{type(self).__name__}: {name}", value, hint))
        if self.start_option is not None:
            self._check_start(self.start_option)

    @property
    def excluded_globs(self) -> Sequence[str]:
        """Globs on parameter names; matching parameters are never compressed."""
        patterns: Sequence[str] = getattr(self, "exclude", ())
        return patterns

    @property
    def configured_start(self) -> int | float | None:
        """The value of the field named by `start_option`; 0 for a hook without that option."""
        return 0 if self.start_option is None else getattr(self, self.start_option)

    def with_start(self: ConfigT, start: int) -> ConfigT:
        """A copy that starts after `start` steps; `self` for a hook without a start option."""
        return self if self.start_option is None else dataclasses.replace(self, **{self.start_option: start})

    def resolved(self: ConfigT, total_steps: int | None) -> ConfigT:
        """A copy whose start is a number of steps.

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
                START_IF_UNKNOWN if total_steps is None else min(LATEST_DEFAULT_START, math.ceil(0.1 * total_steps))
            )
        if total_steps is None:
            raise HookConfigError(
                f"{self.start_option}={start!r} is a fraction of the run, whose length is unknown here: "
                "pass total_steps=N (in YAML `total_steps: N` beside `hook`, for `commhooks plan` --total-steps N), or "
                f"give {self.start_option} as an int, a number of steps"
            )
        return self.with_start(math.ceil(start * total_steps))

    def _check_start(self, name: str) -> None:
        start = getattr(self, name)
        if isinstance(start, int):
            self._require(start >= 0, name, "a number of steps, 0 or more")
            self._require(start <= LARGEST_STEP, name, f"a number of steps, {LARGEST_STEP} at most")
        elif start is not None:
            self._require(
                0 < start < 1, name, "a fraction of the run strictly between 0 and 1, or an int for a number of steps"
            )

    def _require(self, holds: bool, name: str, expected: str) -> None:
        """Raise HookConfigError unless `holds`; for `__post_init__` of subclasses."""
        if not holds:
            raise invalid(f"{type(self).__name__}: {name}", getattr(self, name), expected)


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


def from_options(config: type[ConfigT], options: Mapping[str, Any]) -> ConfigT:
    """Make a config from `hook_options`: values as parsed from YAML.

    Raises:
        HookConfigError: an unknown name (the message suggests the closest one) or a value of the wrong type or range.
    """
    hints = _hints(config)
    for name in options:
        if name not in hints:
            raise no_such(f"hook {config.hook_name!r}", "option", str(name), hints)
    where = f"{config.__name__}: "
    return config(**{name: checked(where + name, each, hints[name], text=True) for name, each in options.items()})


def _hints(config: Any) -> dict[str, Any]:
    """Field -> type."""
    hints = typing.get_type_hints(config)
    return {each.name: hints[each.name] for each in dataclasses.fields(config)}
