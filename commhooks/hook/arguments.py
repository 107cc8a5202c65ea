"""Explain an argument that a function does not have: most often it is an option of the hook that stands beside it."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from commhooks.compressors.config import HookConfig
from commhooks.compressors.registry import COMPRESSORS, canonical_name
from commhooks.errors import HookConfigError, closest

P = ParamSpec("P")
T = TypeVar("T")


def unknown_argument(
    caller: str, name: str, value: object, hook: object, known: Collection[str], introduction: str = "; it knows"
) -> HookConfigError:
    """The error for `caller(hook, name=value)`, where `name` is none of the `known` arguments. `introduction`: what
    comes before the list of these."""
    option = _option(name, hook, known)
    if option is not None:
        return HookConfigError(f"{caller} has no argument {name!r}: {_where_it_belongs(option, name, value, hook)}")
    offer = closest(name, known)
    return HookConfigError(f"{caller} has no argument {name!r}{offer}{introduction} {', '.join(sorted(known))}")


def misplaced_option(caller: str, name: str, value: object, hook: object) -> HookConfigError | None:
    """The error if `name` is exactly the name of an option of `hook`, for callers that do not know all of their
    arguments."""
    if name not in _options(hook):
        return None
    return HookConfigError(f"{caller} has no argument {name!r}: {_where_it_belongs(name, name, value, hook)}")


def explains_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an unknown keyword argument raises `unknown_argument` instead of TypeError. `function` has the
    parameter `hook` in second place."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in kwargs.items():
            if name not in known:
                hook = args[1] if len(args) > 1 else kwargs.get("hook")
                raise unknown_argument(function.__name__, name, value, hook, known)
        return function(*args, **kwargs)

    return checked


def _option(name: str, hook: object, known: Collection[str]) -> str | None:
    """The option of `hook` that `name` probably means; None if an argument of the caller is as likely."""
    options = _options(hook)
    if name in options:
        return name
    parts = [option for option in options if len(name) > 2 and name.lower() in option.lower()]
    if parts:  # "rank" for "matrix_approximation_rank"
        return parts[0]
    if difflib.get_close_matches(name, known, n=1):
        return None
    return next(iter(difflib.get_close_matches(name, options, n=1)), None)


def _where_it_belongs(option: str, name: str, value: object, hook: object) -> str:
    config = _config_class(hook)
    assert config is not None
    which = "that is an option" if option == name else f"there is an option {option!r}"
    if isinstance(hook, str):
        return f"{which} of hook {config.hook_name!r}; write hook_options={{{option!r}: {value!r}}}"
    return f"{which} of the hook; write {config.__name__}({option}={value!r})"


def _options(hook: object) -> list[str]:
    config = _config_class(hook)
    return [] if config is None else [field.name for field in dataclasses.fields(config)]


def _config_class(hook: object) -> type[HookConfig] | None:
    if isinstance(hook, HookConfig):
        return type(hook)
    compressor = COMPRESSORS.get(canonical_name(hook) or "") if isinstance(hook, str) else None
    return None if compressor is None else compressor.Config
