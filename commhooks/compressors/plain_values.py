"""The one checker of options: a value and the type that it should have, to the checked plain value or an error.

A value is written in Python, where types are strict, or as text in YAML, the environment or a flag, where "4" stands
for 4. It may also be a container of OmegaConf, which Hydra passes to the objects that it makes."""

import contextlib
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union

from commhooks.errors import HookConfigError, invalid

_YAML_BOOLS = dict.fromkeys(("true", "yes", "on", "y"), True) | dict.fromkeys(("false", "no", "off", "n"), False)


def as_type(value: Any, hint: Any, *, text: bool = False) -> Any:
    """`value` if it is of the type `hint`; a list or dict as a copy, an int as a float where only a float is expected.

    Args:
        hint: bool, int, float, str, list[str], dict[str, Any], another class, or a union of these with None.
        text: convert text to what YAML reads in it, and a number to text where text is expected.

    Raises:
        TypeError: it is of another type.
        OverflowError: a float is expected, and this number is too large for one.
    """
    kinds = _kinds(hint)
    if text:
        value = _read(value, kinds)
    if value is None or isinstance(value, bool):
        if type(value) in kinds:
            return value
    elif isinstance(value, Mapping):
        if dict[str, Any] in kinds and all(isinstance(key, str) for key in value):
            return dict(value)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if list[str] in kinds and all(isinstance(each, str) for each in value):
            return list(value)
    elif isinstance(value, int) and float in kinds and int not in kinds:
        return float(value)
    elif isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type))):
        return value
    raise TypeError


def checked(where: str, value: Any, hint: Any, *, text: bool = False) -> Any:
    """As `as_type`, with a HookConfigError about the option or setting `where`."""
    try:
        return as_type(value, hint, text=text)
    except (TypeError, OverflowError):
        raise invalid(where, value, in_words(hint)) from None


def in_words(hint: Any) -> str:
    """A type, for messages."""
    if len(kinds := _kinds(hint)) > 1:
        return " or ".join(map(in_words, kinds))
    if hint == list[str]:
        return "a list of text"
    if hint == dict[str, Any]:
        return "options, as 'name: value'"
    if hint is bool:
        return "True or False"
    return "None" if hint is type(None) else hint.__name__


def plain(where: str, value: Any) -> Any:
    """`value` with all interpolations resolved and each container of OmegaConf, also inside dicts and lists, replaced.

    Args:
        where: begins messages.

    Raises:
        HookConfigError: a value is missing ("???"), or an interpolation leads nowhere.
    """
    if "omegaconf" not in sys.modules:  # it is slow to import, and without it there is none of its containers
        return value
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if OmegaConf.is_config(value):
        try:
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise HookConfigError(f"{where}{error.full_key}: {str(error).splitlines()[0]}") from error
    if type(value) is dict:
        return {key: plain(f"{where.removesuffix(': ')}.{key}: ", each) for key, each in value.items()}
    if type(value) is list:
        return [plain(f"{where.removesuffix(': ')}[{place}]: ", each) for place, each in enumerate(value)]
    return value


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _read(value: Any, kinds: tuple[Any, ...]) -> Any:
    """What YAML reads in `value` as one of these types; `value` itself if that is none of them."""
    if str in kinds:
        return str(value) if int not in kinds and isinstance(value, (bool, int, float, os.PathLike)) else value
    if not isinstance(value, str):
        return value
    if bool in kinds:
        return _YAML_BOOLS.get(value.lower(), value)
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                return kind(value)
    return value
