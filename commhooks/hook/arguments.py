"""What the signatures of the front ends share: the documentation of their arguments, and the error about an argument
that a function does not have, which most often is an option of the hook that stands beside it."""

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from commhooks.compressors.hook_config import HookConfig, argument_entries
from commhooks.compressors.registry import COMPRESSORS, canonical_name
from commhooks.errors import HookConfigError, closest, closest_name
from commhooks.hook.announce import reason_first
from commhooks.hook.vocabulary import ARGUMENTS

P = ParamSpec("P")
T = TypeVar("T")


def arguments_in(scope: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that front ends have in common which are in `scope`, the `locals()` of a constructor."""
    return {name: scope[name] for name in ARGUMENTS if name in scope}


def documented_by(source: object) -> Callable[[type[T]], type[T]]:
    """Class decorator: in the docstring, the names in a line "a, b: as in `commhooks.attach`." get their entries in the
    docstring of `source`. For `help()` and for jsonargparse."""
    entries = argument_entries(source.__doc__)

    def expanded(line: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {entries[name]}" for name in line[1].split(", "))

    def decorate(owner: type[T]) -> type[T]:
        doc = inspect.cleandoc(owner.__doc__ or "")  # as Python itself does it from 3.13 on
        owner.__doc__ = re.sub(r"^ {4}([\w, ]+): as in `commhooks.attach`\.$", expanded, doc, flags=re.MULTILINE)
        return owner

    return decorate


def unknown_argument(
    caller: str, name: str, value: object, hook: object, known: Collection[str], introduction: str = "; it knows"
) -> HookConfigError:
    """The error for `caller(hook, name=value)`, where `name` is none of the `known` arguments. `introduction`: what
    comes before the list of these."""
    option, config = _meant(name, hook, known)
    if config is not None:
        return HookConfigError(
            f"{caller} has no argument {name!r}: {_where_it_belongs(option, config, name, value, hook)}"
        )
    return HookConfigError(
        f"{caller} has no argument {name!r}{closest(name, known)}{introduction} {', '.join(sorted(known))}"
    )


def misplaced_option(caller: str, name: str, value: object, hook: object) -> HookConfigError | None:
    """The error if `name` is exactly the name of an option of `hook`, for callers that do not know all of their
    arguments."""
    config = config_class(hook)
    return None if config is None or name not in _options(config) else unknown_argument(caller, name, value, hook, ())


def unknown_flag(flag: str, value: str, hook: str, known: Collection[str], options_flag: str) -> str:
    """The message about a `flag` that a command lacks, with its `value`. `options_flag`: the one that takes options of
    `hook`, as NAME=VALUE."""
    if not difflib.get_close_matches(flag, known, n=1, cutoff=0.85):
        option, config = _meant(flag.lstrip("-").replace("-", "_"), hook, ())
        if config is not None:
            written = f"{options_flag} {_on_command_line(option, value)}"
            if config is config_class(hook):
                return f"there is no flag {flag}; {option} is an option of the hook: write {written}"
            return (
                f"there is no flag {flag}; {option} is an option of hook {config.hook_name!r}: write --hook "
                f"{config.hook_name} {written}"
            )
    return f"there is no flag {flag}{closest(flag, known)}"


ELSEWHERE = "powerSGD"
"""The hook whose options are explained beside other hooks, too."""
HOOKS = (
    "a name such as 'powerSGD' (see commhooks.available_hooks()), a config object such as commhooks.PowerSGD(), or a "
    "callable"
)
"""What the argument `hook` can be."""


def explains_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an unknown keyword argument raises `unknown_argument` instead of TypeError, and a missing hook says
    what it can be. `function`, also an `__init__`, has the parameter `hook` in second place."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        with reason_first():
            check(args, kwargs)
            return function(*args, **kwargs)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caller = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
        for name, value in kwargs.items():
            if name not in parameters and not takes_all:
                hook = args[1] if len(args) > 1 else kwargs.get("hook")
                raise unknown_argument(caller, name, value, hook, [each for each in parameters if each != "self"])
        if len(args) == 1 and "hook" not in kwargs:
            meant = [each for each in kwargs if each not in parameters and closest_name(each, ["hook"])]
            also = "".join(f"; it has no argument {each!r} (did you mean 'hook'?)" for each in meant)
            raise HookConfigError(f"{caller} needs a hook: {HOOKS}. hook=None is plain averaging without a hook{also}")

    return checked


def _on_command_line(option: str, value: str) -> str:
    if option != "exclude":
        return f"{option}={value}"
    patterns = [each.strip(" '\"") for each in value.strip("[]").split(",")]
    return f'"{option}={patterns}"'  # quoted for YAML, where * begins an alias, and for the shell


def _meant(name: str, hook: object, known: Collection[str]) -> tuple[str, type[HookConfig] | None]:
    """The option that `name` probably means, with the config of `hook`, or of `ELSEWHERE`, that has it. ("", None) if
    an argument of the caller is as likely."""
    for each in (hook, ELSEWHERE):
        config = config_class(each)
        options = [] if config is None else _options(config)
        found = name if name in options else closest_name(name, options)
        if found is None:
            continue
        if name.lower() in found.lower():  # "rank" for "matrix_approximation_rank"
            return found, config
        slight = each is not hook and not difflib.get_close_matches(name, options, 1, 0.8)
        if not slight and not difflib.get_close_matches(name, known, n=1):
            return found, config
    return "", None


def _where_it_belongs(option: str, config: type[HookConfig], name: str, value: object, hook: object) -> str:
    if config is not config_class(hook):
        return (
            f"{option!r} is an option of hook {config.hook_name!r}; write hook={config.hook_name!r}, "
            f"hook_options={{{option!r}: {value!r}}}"
        )
    which = "that is an option" if option == name else f"there is an option {option!r}"
    if isinstance(hook, str):
        return f"{which} of hook {config.hook_name!r}; write hook_options={{{option!r}: {value!r}}}"
    return f"{which} of the hook; write {config.__name__}({option}={value!r})"


def _options(config: type[HookConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def config_class(hook: object) -> type[HookConfig] | None:
    """The class of the options of `hook`, a config or the name of a hook; None for anything else."""
    if isinstance(hook, HookConfig):
        return type(hook)
    compressor = COMPRESSORS.get(canonical_name(hook) or "") if isinstance(hook, str) else None
    return None if compressor is None else compressor.Config
