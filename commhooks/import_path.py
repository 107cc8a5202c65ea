"""Import an object by the path that a user has written, such as "package.module:name"."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from commhooks.errors import HookConfigError, did_you_mean


def import_path(path: str, subject: str, *, kind: str = "function") -> Any:
    """Import the object at `path`: "package.module:name" or "folder/file.py:name".

    `name` may contain dots. Raises HookConfigError if the path is malformed, or the file, module or
    name does not exist; other errors of the import propagate. `subject`, `kind`: the path and the
    expected kind of object in messages.

    The path of a file is relative to the current folder, or absolute, or begins with "~".
    "folder/file.py" is imported as `folder.file`; a file outside of the current folder as by
    `python file.py`, with its own folder in `sys.path` (of a file in a package: the folder around
    the package). What is put into `sys.path` stays there, because the file's functions may import
    more.

    Security: pass only paths from the user's arguments, configuration or command line, never from a
    checkpoint.
    """
    module_name, _, name = path.partition(":")
    file = None
    if module_name.endswith(".py") and name:
        file = Path(os.path.abspath(Path(module_name).expanduser()))
        module_name = _module_name(file, subject)
    # A path from a YAML file or a flag has no base package, so it cannot be relative.
    if not all((*module_name.split("."), *name.split("."))):
        raise HookConfigError(
            f"{subject} is not a path: expected 'package.module:{kind}' with the full name of the"
            f" module, or 'folder/file.py:{kind}'"
        )
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{error.name}."
        )
        hint = f"; start where `import {module_name}` works" if missing else ""
        raise HookConfigError(f"{subject}: cannot import {module_name!r}: {error}{hint}") from error
    if file is not None and not _is_of(module, file):
        origin = getattr(module, "__file__", None) or "a built-in module"
        raise HookConfigError(
            f"{subject}: `import {module_name}` finds {origin} instead of {file}: rename one of"
            " them"
        )
    return _attribute(module, module_name, name, subject)


def _module_name(file: Path, subject: str) -> str:
    """Return the name by which `file` is imported, and put its root folder into `sys.path`."""
    if not file.is_file():
        raise HookConfigError(f"{subject}: there is no file {str(file)!r}")
    if "." in file.stem:
        raise HookConfigError(
            f"{subject}: Python cannot import a file with a '.' in its name: rename it"
        )
    root = Path.cwd()
    if not file.is_relative_to(root) or any(
        "." in folder for folder in file.relative_to(root).parts[:-1]
    ):
        root = file.parent
        while (root / "__init__.py").is_file():
            root = root.parent
    if not any(Path(entry).absolute() == root for entry in sys.path):
        sys.path.insert(0, str(root))
    return ".".join(file.relative_to(root).with_suffix("").parts)


def _is_of(module: Any, file: Path) -> bool:
    source = getattr(module, "__file__", None)
    return source is not None and os.path.samefile(source, file)


def _attribute(module: Any, module_name: str, name: str, subject: str) -> Any:
    target = module
    where = module_name
    for part in name.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise HookConfigError(
                f"{subject}: {where!r} has no {part!r}{did_you_mean(part, dir(target))}"
            ) from None
        where = f"{where}.{part}"
    return target
