"""Import objects that a user names as `package.module:name`: a hook, its state, a function that builds a model. And
whether such a function takes its arguments."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from commhooks.errors import CommHookError, HookConfigError, did_you_mean

FILE_ENDING = ".py"


def import_path(
    path: str, said: str, *, kind: str = "function", error_class: type[CommHookError] = HookConfigError
) -> Any:
    """Import the object that `path` names; the part after the colon may contain dots (`package.module:Class.method`).
    The part before it may be the path of a Python file (`folder/train.py:build`), which is imported as the module
    `train` from its folder.

    Security: pass only paths from the user's arguments, configuration or command line, never from a checkpoint.

    Args:
        said: description of the path for messages, for example "hook 'package.module:name'".
        kind: the expected kind of object, for messages.

    Raises:
        error_class: the path is malformed, or the module or name does not exist. Other errors that the module raises
            while it is imported pass through.
    """
    if path.endswith(FILE_ENDING):
        raise error_class(f"{said} is a Python file; write '{path}:name', with the name of a {kind} in it")
    module_name, _, name = path.rpartition(":") if f"{FILE_ENDING}:" in path else path.partition(":")
    if module_name.endswith(FILE_ENDING):
        return _attribute(_imported_file(module_name, said, error_class), name, said, error_class)
    # Reject relative paths: a path from a YAML file or a flag has no base package.
    if not all((*module_name.split("."), *name.split("."))):
        raise error_class(f"{said} is not a path: expected 'package.module:{kind}' with the full name of the module")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        hint = f"; start where `import {module_name}` works" if missing else ""
        raise error_class(f"{said}: cannot import {module_name!r}: {error}{hint}") from error
    return _attribute(found, name, said, error_class)


def why_not_called(function: Callable[..., Any], *arguments: object) -> str:
    """Why `function` cannot be called with these arguments; "" if it can, or does not tell."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin without a signature
        pass
    return ""


def _attribute(module: Any, name: str, said: str, error_class: type[CommHookError]) -> Any:
    found, where = module, module.__name__
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise error_class(f"{said}: {where!r} has no {part!r}{did_you_mean(part, dir(found))}") from None
        where = f"{where}.{part}"
    return found


def _imported_file(file: str, said: str, error_class: type[CommHookError]) -> Any:
    """Import a file as Python would if its folder were the current one."""
    path = os.path.abspath(file)
    if not os.path.isfile(path):
        raise error_class(f"{said}: there is no file {path}")
    folder, name = os.path.split(path)
    with _first_in_path(folder):
        try:
            module = importlib.import_module(name.removesuffix(FILE_ENDING))
        except ImportError as error:
            raise error_class(f"{said}: cannot import {path}: {error}") from error
    if os.path.abspath(getattr(module, "__file__", None) or "") != path:
        raise error_class(f"{said}: a module {module.__name__!r} of another file is imported already; rename {name}")
    return module


def current_folder_first() -> contextlib.AbstractContextManager[None]:
    """Put the current directory first in `sys.path`, as `python -m` does. A console script has its own directory there
    instead."""
    return _first_in_path(os.getcwd())


@contextlib.contextmanager
def _first_in_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
