"""Configuration: one frozen dataclass per hook. The same definition serves Python, YAML (as an OmegaConf structured
config), `--help` and checkpoints. Fields have the names of the arguments of torch's hooks."""

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, Union

from commhooks.compressors.plain_values import plain, unresolved
from commhooks.errors import HookConfigError, closest, shown

DEFAULT_START_STEP = 1000
LARGEST_STEP = 2**62
"""The largest step number that a checkpoint can hold."""
ConfigT = TypeVar("ConfigT", bound="HookConfig")
NUMBER_OR_NUMBERS = int | dict[str, int]
"""The type of an option that is a number, or numbers by globs on parameter names."""
_YAML_BOOLS = ("true", "false", "yes", "no", "on", "off", "y", "n")


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    """Base of the config classes. Fields are bool, int, float, str, a list of str, or a union of these with None; or an
    int or a dict of str to int, which are numbers by globs on parameter names.

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
    the run, None 10 % of it (at most 1000 steps). Before that step gradients are averaged uncompressed."""
    without_use: ClassVar[tuple[str, ...]] = ()
    """Inherited options that this hook refuses or does not need: lists of options leave them out."""

    def __new__(cls: type[ConfigT], *args: Any, **kwargs: Any) -> ConfigT:
        # An unknown keyword argument would end in a TypeError of `__init__` that offers nothing.
        known = inspect.signature(cls.__init__).parameters.values()
        names = [each.name for each in known][1:]
        if not any(each.kind is each.VAR_KEYWORD for each in known):
            for name in kwargs:
                if name not in names:
                    raise HookConfigError(no_such_option(cls.__name__, name, names))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        # Check types as strictly as YAML does: a dataclass accepts any type.
        hints = typing.get_type_hints(type(self))
        for each in dataclasses.fields(self):
            given, hint = getattr(self, each.name), hints[each.name]
            value = plain(f"{type(self).__name__}: {each.name}", given)
            if value is not given:
                object.__setattr__(self, each.name, value)
            if not _fits(value, hint):
                raise HookConfigError(
                    f"{type(self).__name__}: {each.name}={shown(value)} is a {type(value).__name__}; "
                    f"expected {_describe(hint)}"
                )
            if hint is float and isinstance(value, int):
                # Convert as YAML does, so that configurations from Python and YAML compare equal across ranks.
                try:
                    object.__setattr__(self, each.name, float(value))
                except OverflowError:
                    raise HookConfigError(f"{type(self).__name__}: {each.name} is too large a number") from None
            # Copy: the caller may change its list or dict later.
            if hint == list[str]:
                object.__setattr__(self, each.name, list(value))
            elif isinstance(value, Mapping):
                object.__setattr__(self, each.name, dict(value))
        if self.start_option is not None:
            self._check_start(self.start_option)

    @property
    def excluded_globs(self) -> Sequence[str]:
        """Globs on parameter names; matching parameters are never compressed."""
        patterns: Sequence[str] = getattr(self, "exclude", ())
        return patterns

    @property
    def option_globs(self) -> Sequence[str]:
        """Globs on parameter names by which an option has a value of its own; see `ParameterInfo.glob`."""
        return ()

    @property
    def glob_option(self) -> str:
        """The name of the option with `option_globs`, for messages."""
        return ""

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
                DEFAULT_START_STEP if total_steps is None else min(DEFAULT_START_STEP, math.ceil(0.1 * total_steps))
            )
        if total_steps is None:
            raise HookConfigError(
                f"{self.start_option}={start!r} is a fraction of the run, whose length is unknown here: "
                "pass total_steps=N (in YAML, write `total_steps: N` beside `hook`), or give "
                f"{self.start_option} as an int, a number of steps"
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
            raise HookConfigError(f"{type(self).__name__}: {name}={shown(getattr(self, name))}; expected {expected}")


def explained_options(config: type[HookConfig]) -> dict[str, str]:
    """Option -> what it does, in a sentence: the first one of its entry under "Args:" in the docstring of the class, of
    its nearest base, or of another class derived from that. Without an entry: "". Without the options of no use."""
    found: dict[str, str] = {}
    bases = [each for each in config.__mro__ if issubclass(each, HookConfig) and each is not HookConfig]
    for each in (*bases, *(beside for base in bases for beside in base.__subclasses__())):
        section = inspect.cleandoc(each.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, re.MULTILINE):
            found.setdefault(name, " ".join(text.split()).partition(". ")[0].rstrip("."))
    names = [each.name for each in dataclasses.fields(config) if each.name not in config.without_use]
    return {name: found.get(name, "") for name in names}


def from_options(config: type[HookConfig], options: Mapping[str, Any]) -> HookConfig:
    """Make a config from `hook_options`: values as parsed from YAML, checked by OmegaConf against the dataclass.

    Raises:
        HookConfigError: an unknown name (the message suggests the closest one) or a value of the wrong type or range.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in fields:
            raise HookConfigError(no_such_option(f"hook {config.hook_name!r}", str(name), fields))
    made = converted(config, options, f"hook {config.hook_name!r}: option ")
    assert isinstance(made, HookConfig)
    return made


def no_such_option(whose: str, name: str, known: Sequence[str]) -> str:
    """An error message about an unknown option."""
    if not known:
        return f"{whose} has no options, got {name!r}"
    return f"{whose} has no option {name!r}{closest(name, known)}; its options are {', '.join(known)}"


def converted(config: type, options: Mapping[str, Any], where: str) -> Any:
    """An object of the dataclass `config` from these options, which OmegaConf converts and completes. `where` begins
    messages about a single option.

    Raises:
        HookConfigError: a value of the wrong type, or out of range.
    """
    from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

    values = _checked_types(config, options, where)
    try:
        return _made(config, values)
    except (InterpolationResolutionError, MissingMandatoryValue) as error:
        raise HookConfigError(f"{where}{error.full_key}: {unresolved(error)}") from None
    except OmegaConfBaseException as error:
        name = re.split(r"[.\[]", error.full_key or "")[0]
        given, hint = values.get(name), typing.get_type_hints(config).get(name)
        raise HookConfigError(
            f"{where}{name}: {shown(given)} is of type {type(given).__name__}; expected {_describe(hint)}"
            if name in values
            else f"{where}{error.full_key}: {unresolved(error)}"
        ) from None


def _made(config: type, values: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    by_glob = [name for name, hint in typing.get_type_hints(config).items() if hint == NUMBER_OR_NUMBERS]
    if not by_glob:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config), values))
    # OmegaConf knows no union of an int and a dict: it gets the one of them that the value is.
    fields: list[Any] = []
    for each in dataclasses.fields(config):
        name, hint = each.name, typing.get_type_hints(config)[each.name]
        own = {} if each.default is dataclasses.MISSING else {"default": each.default}
        own |= {} if each.default_factory is dataclasses.MISSING else {"default_factory": each.default_factory}
        if name in by_glob:
            hint = dict[str, int] if isinstance(values.get(name), Mapping) else int
            own = {"default_factory": dict} if hint is not int else own
        fields.append((name, hint, dataclasses.field(**own)))
    plain = dataclasses.make_dataclass(config.__name__, fields)
    merged = OmegaConf.merge(OmegaConf.structured(plain), values)
    return config(**vars(OmegaConf.to_object(merged)))


def _checked_types(config: type, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Prepare `options` for OmegaConf, whose conversions are too lenient in one case (4 becomes True) and too strict
    in another ("4" from an environment variable is not accepted as `int | float`). `where` begins error messages.

    Raises:
        HookConfigError: an invalid bool, a number too large for a float, or a string where a list of strings is
            expected.
    """
    hints, values = typing.get_type_hints(config), dict(options)
    for name, value in options.items():
        hint = hints[name]
        if hint == list[str]:
            # OmegaConf would convert list items of any type to strings.
            if not _is_list_of_text(value):
                raise HookConfigError(
                    f"{where}{name}: Value {shown(value)} is not a list of text; write it as ['*embed*', 'head.weight']"
                )
            values[name] = list(value)
            continue
        if isinstance(value, Mapping) and hint == NUMBER_OR_NUMBERS:
            if not all(isinstance(key, str) and not isinstance(each, bool) for key, each in value.items()):
                raise HookConfigError(
                    f"{where}{name}: Value {shown(value)} is neither a number nor numbers by globs on names; write it "
                    "as 4, or as {'*attention*': 8, '*': 2}"
                )
            values[name] = dict(value)
            continue
        if isinstance(value, str):
            values[name] = _number(value) if float in typing.get_args(hint) else value
            wrong = _is_bool(hint) and "${" not in value and value.strip().lower() not in _YAML_BOOLS
        else:
            wrong = _is_bool(hint) and isinstance(value, (int, float)) and not isinstance(value, bool)
        if wrong:
            raise HookConfigError(
                f"{where}{name}: Value {shown(value)} is not a valid bool; expected True or False"
                + ("" if hint is bool else " or None")
            )
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                values[name] = float(value)
            except OverflowError:
                raise HookConfigError(f"{where}{name}: Value is too large a number") from None
    return values


def _number(text: str) -> Any:
    """`text` parsed as an int or a float; `text` itself if it is neither."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _is_bool(hint: Any) -> bool:
    """Whether the type is bool, or bool or None."""
    return hint is bool or set(typing.get_args(hint)) == {bool, type(None)}


def _fits(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is type(None):
        return value is None
    if hint == list[str]:
        return _is_list_of_text(value)
    if hint == dict[str, int]:
        return isinstance(value, Mapping) and all(_fits(k, str) and _fits(v, int) for k, v in value.items())
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float))
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in typing.get_args(hint))
    if hint == list[str]:
        return "a list of text"
    if hint == dict[str, int]:
        return "numbers by globs on names, as in {'*attention*': 8, '*': 2}"
    if typing.get_origin(hint) is dict:
        return "options, as 'name: value'"
    return "None" if hint is type(None) else hint.__name__


def _is_list_of_text(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, (str, bytes))
        and all(isinstance(item, str) for item in value)
    )
