"""Import and call what the user names on a command line: a function that builds the model, a hook."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from commhooks.errors import HookConfigError
from commhooks.request import import_path, why_not_called


@contextlib.contextmanager
def user_code(path: str) -> Iterator[None]:
    """Context manager for importing and running the code at `path`, as `python -m` would without arguments: the current
    folder is first in `sys.path`, and `sys.argv` does not hold the arguments of our command.

    Raises:
        HookConfigError: the code ends the program, as `parse_args()` does where an argument is missing.
    """
    before, folder = sys.argv, os.getcwd()
    sys.argv = [path.partition(":")[0]]
    sys.path.insert(0, folder)
    try:
        yield
    except SystemExit as error:
        raise HookConfigError(
            f"{path!r} has called sys.exit({error.code!r}) while it was imported or called. A script's own run, with "
            "its parse_args(), belongs under `if __name__ == '__main__':`"
        ) from error
    finally:
        sys.argv = before
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def call(path: str) -> Any:
    """The result of the function at `path`, called without arguments inside `user_code`."""
    with user_code(path):
        function = import_path(path, repr(path))
        if not callable(function) or isinstance(function, torch.nn.Module):
            raise HookConfigError(f"{path!r} is a {type(function).__name__}; expected a function that builds the model")
        if reason := why_not_called(function):
            raise HookConfigError(
                f"{path!r} cannot be called without arguments ({reason}): write a function that builds the model"
            )
        return function()
