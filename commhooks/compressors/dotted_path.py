"""Import objects that a user names as `package.module:name`: a hook, its state, a function that builds a model."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from commhooks.compressors.config import closest
from commhooks.errors import CommHookError, HookConfigError


def import_path(
    path: str, said: str, *, kind: str = "function", error_class: type[CommHookError] = HookConfigError
) -> Any:
    """Import the object that `path` names; the part after the colon may contain dots (`package.module:Class.method`).

    Security: pass only paths from the user's arguments, configuration or command line, never from a checkpoint.

    Args:
        said: description of the path for messages, for example "hook 'package.module:name'".
        kind: the expected kind of object, for messages.

    Raises:
        error_class: the path is malformed, or the module or name does not exist. Other errors that the module raises
            while it is imported pass through.
    """
    module_name, _, name = path.partition(":")
    # Reject relative paths: a path from a YAML file or a flag has no base package.
    if not all((*module_name.split("."), *name.split("."))):
        raise error_class(f"{said} is not a path: expected 'package.module:{kind}' with the full name of the module")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        hint = f"; start where `import {module_name}` works" if missing else ""
        raise error_class(f"{said}: cannot import {module_name!r}: {error}{hint}") from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise error_class(f"{said}: {module_name!r} has no {part!r}{closest(part, dir(found))}") from None
        module_name = f"{module_name}.{part}"
    return found


@contextlib.contextmanager
def current_folder_first() -> Iterator[None]:
    """Put the current directory first in `sys.path`, as `python -m` does. A console script has its own directory there
    instead."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
