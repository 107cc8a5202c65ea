"""Import objects that a user names as `package.module:name`: a hook, its state, a function that builds a model. And
whether such a function takes its arguments."""

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from commhooks.errors import HookConfigError, did_you_mean


def import_path(path: str, said: str, *, kind: str = "function") -> Any:
    """Import the object that `path` names; the part after the colon may contain dots (`package.module:Class.method`).
    `folder/train.py:name` is the same as `folder.train:name`.

    Security: pass only paths from the user's arguments, configuration or command line, never from a checkpoint.

    Args:
        said: description of the path for messages, for example "hook 'package.module:name'".
        kind: the expected kind of object, for messages.

    Raises:
        HookConfigError: the path is malformed, or the module or name does not exist. Other errors that the module
            raises while it is imported pass through.
    """
    module_name, _, name = path.partition(":")
    if module_name.endswith(".py"):
        module_name = os.path.normpath(module_name).removesuffix(".py").replace(os.sep, ".")
    # Reject relative paths: a path from a YAML file or a flag has no base package.
    if not all((*module_name.split("."), *name.split("."))):
        raise HookConfigError(
            f"{said} is not a path: expected 'package.module:{kind}' with the full name of the module"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        hint = f"; start where `import {module_name}` works" if missing else ""
        raise HookConfigError(f"{said}: cannot import {module_name!r}: {error}{hint}") from error
    where = module_name
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise HookConfigError(f"{said}: {where!r} has no {part!r}{did_you_mean(part, dir(found))}") from None
        where = f"{where}.{part}"
    return found


def why_not_called(function: Callable[..., Any], *arguments: object) -> str:
    """Why `function` cannot be called with these arguments; "" if it can, or does not tell."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin without a signature
        pass
    return ""
