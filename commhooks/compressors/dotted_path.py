"""What a user names as `package.module:name`: a hook, its state, a function that builds a model."""

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
    """The object that `path` names; behind the colon there may be dots (`package.module:Class.method`).

    A path is of the user's own arguments, configuration or command line. What a checkpoint holds never comes here.

    Args:
        said: how messages call the path, for example "hook 'package.module:name'".
        kind: of thing that is expected, for messages.

    Raises:
        error_class: it is no path, or there is no such module or name; other errors of that module are its own.
    """
    module_name, _, name = path.partition(":")
    # It may come from a YAML file or a flag: relative to what would nobody know.
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
    """As `python -m` does: a command of its own has the folder of its script among the modules, not this one."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
