"""What the signatures of the front ends share."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from commhooks.errors import no_such, reason_first
from commhooks.hook.vocabulary import ARGUMENTS

P = ParamSpec("P")
T = TypeVar("T")


def arguments_in(scope: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that front ends have in common which are in `scope`, the `locals()` of a constructor."""
    return {name: scope[name] for name in ARGUMENTS if name in scope}


def explains_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: an unknown keyword argument raises HookConfigError, which offers the closest name. Rank 0 prints the
    error first."""
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name != "self"]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        with reason_first():
            for name in kwargs:
                if name not in known and not takes_all:
                    caller = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                    raise no_such(caller, "argument", name, known)
            return function(*args, **kwargs)

    return checked
