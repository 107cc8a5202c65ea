"""The settings of `CommHookKwargs` as YAML: a section of Accelerate's configuration file, or a separate file.

    compute_environment: LOCAL_MACHINE                hook: powerSGD
    distributed_type: MULTI_GPU                       hook_options:
    num_processes: 2                                    matrix_approximation_rank: 4
    comm_hook_config:                                 wrapper: bf16
      hook: powerSGD                                  bucket_cap_mb: 50
      hook_options: {matrix_approximation_rank: 4}
      wrapper: bf16
      bucket_cap_mb: 50

The keys are the arguments of `CommHookKwargs`. Arguments that are objects in Python are strings here, and
`hook: null` is DDP without a hook.
"""

import contextlib
import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml
from accelerate import DistributedDataParallelKwargs

from accelerate_commhooks.flags import SECTION
from accelerate_commhooks.stock_fields import STOCK_HOOK_FIELDS
from commhooks.errors import HookConfigError
from commhooks.hook.for_plugins import (
    ARGUMENTS,
    COMPRESSORS,
    OFF,
    canonical_name,
    closest,
    converted,
    import_path,
    means_no_hook,
    unresolved,
)

SECTION_OF = ", section "
"""Stands between a file and its section in the name of a source."""
NEAR = 0.7
"""A key that is so similar to `SECTION`, from 0 to 1, is a misspelt one."""


def _ddp_fields() -> list[tuple[str, Any, Any]]:
    found = []
    for each in dataclasses.fields(DistributedDataParallelKwargs):
        if each.name not in STOCK_HOOK_FIELDS:
            # Annotated as int in Accelerate 1.15, but DDP accepts fractions of a megabyte.
            hint = int | float if each.name == "bucket_cap_mb" else each.type
            found.append((each.name, hint, field(default=each.default)))
    return found


_HOOK_FIELDS = [
    (name, each.kind, field(default="???" if name == "hook" else each.default)) for name, each in ARGUMENTS.items()
]
CommHookConfig = dataclasses.make_dataclass("CommHookConfig", _HOOK_FIELDS + _ddp_fields())
"""The section: the arguments of all front ends, and the DDP arguments of the installed Accelerate."""


def read_settings(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the settings in a YAML file: its section `comm_hook_config`, or the whole file if there is no section.

    Args:
        overrides: "key=value" or "hook_options.key=value"; each replaces a value of the file.

    Returns:
        The keys that are set, checked and converted, with interpolations resolved: plain types only. Dotted paths in
        `hook` and `hook_state` are not imported.

    Raises:
        HookConfigError: no such file, not YAML, or invalid settings; the message names the file and the full key.
    """
    loaded = _load(path)
    if SECTION in loaded:
        return section_settings(path, overrides)
    if "compute_environment" in loaded or "distributed_type" in loaded:
        raise HookConfigError(f"{path} is a configuration of Accelerate without a section {SECTION!r}. {HOW_TO_WRITE}")
    return _checked(str(path), "", _resolved(path, loaded, "", overrides))


def section_settings(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """As `read_settings`, but the file must have the section."""
    loaded = _load(path)
    if SECTION not in loaded:
        raise HookConfigError(f"{path} has no section {SECTION!r}. {HOW_TO_WRITE}")
    return _checked(str(path), SECTION, _resolved(path, loaded, SECTION, overrides))


def overridden(settings: Mapping[str, Any], overrides: Iterable[str], source: str) -> dict[str, Any]:
    """`settings` with overrides as in `read_settings`; `source` is for error messages."""
    from omegaconf import OmegaConf

    return _checked(source, "", _resolved(source, OmegaConf.create(dict(settings)), "", overrides))


def source_of(path: str | Path) -> str:
    """The name of the settings in this file, for messages."""
    return f"{path}{SECTION_OF}{SECTION}" if has_section(path) else str(path)


def has_section(path: str | Path) -> bool:
    return SECTION in _load(path)


def to_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to arguments for `CommHookKwargs`. A `hook_state` "package.module:name" is imported; a class or
    function is called without arguments to make the state."""
    arguments = dict(settings)
    path = arguments.get("hook_state")
    if path is not None:
        found = import_path(path, f"hook_state={path!r}", kind="name")
        arguments["hook_state"] = found() if inspect.isclass(found) or inspect.isfunction(found) else found
    return arguments


@contextlib.contextmanager
def saying_where(source: str | Path) -> Iterator[None]:
    """Prefix the messages of errors in the body with `source`, a file or `file, section comm_hook_config`, and the key
    there."""
    try:
        yield
    except HookConfigError as error:
        file, _, section = str(source).partition(SECTION_OF)
        message = str(error)
        option = re.match(r"(\w+)=", message)
        if option is not None and option[1] not in (each.name for each in dataclasses.fields(CommHookConfig)):
            section = _full(section, "hook_options")
        raise HookConfigError(_at_its_key(file, section, message)) from error


HOW_TO_WRITE = (
    "Write one with `accelerate-commhooks config FILE --hook powerSGD`, or start the script without a communication "
    "hook with `accelerate launch`"
)


# ------------------------------------------------------------------------------------------------------------- reading


def _load(path: str | Path) -> Any:
    from omegaconf import DictConfig, OmegaConf  # a local import, because it is slow
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        raise HookConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HookConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise HookConfigError(f"{path}: {error.full_key}: {unresolved(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise HookConfigError(f"{path} holds a list, not settings ('key: value')")  # OmegaConf reads nothing else
    if SECTION not in loaded and "hook" not in loaded:
        near = [key for key in map(str, loaded) if difflib.SequenceMatcher(None, key, SECTION).ratio() > NEAR]
        if near and near[0] != SECTION:  # with the value "???"
            raise HookConfigError(f"{path}: {near[0]}: the section for the hook is called {SECTION}: rename it")
    return loaded


def _resolved(source: str | Path, loaded: Any, section: str, overrides: Iterable[str]) -> Any:
    """The settings as plain types. The whole file is resolved, because interpolations may refer to any key in it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given = list(overrides)
    for each in given:
        if not isinstance(each, str) or not each.partition("=")[0].strip() or "=" not in each:
            raise HookConfigError(f"{source}: override {each!r}; expected 'key=value' or 'hook_options.key=value'")
    try:
        changes = OmegaConf.from_dotlist(given)
        if given:
            loaded = OmegaConf.merge(loaded, {section: changes} if section else changes)
        node = loaded[section] if section else loaded
        if not OmegaConf.is_config(node):
            return node
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise HookConfigError(f"{source}: {error.full_key or section}: {unresolved(error)}") from error
    except TypeError as error:  # a list in the file, and an override of a key in it
        raise HookConfigError(f"{source}: overrides {given}: {section} is no 'key: value' in this file") from error
    except yaml.YAMLError as error:
        raise HookConfigError(
            f"{source}: overrides {given}: a value is not YAML; put text with special characters in quotes, as in "
            "hook_options.exclude=['*embed*']"
        ) from error


# ------------------------------------------------------------------------------------------------------------ checking


def _checked(source: str, section: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        where = f"{source}: {section}" if section else source
        what = "is empty" if not values else f"is a {type(values).__name__}, not settings ('key: value')"
        raise HookConfigError(f"{where} {what}; it needs at least 'hook: powerSGD' or another hook")
    _check_keys(source, section, values, [each.name for each in dataclasses.fields(CommHookConfig)])
    if "hook" not in values:
        raise HookConfigError(f"{source}: {_full(section, 'hook')} is missing; it says which hook, e.g. 'powerSGD'")
    if means_no_hook(values["hook"]):
        values = values | {"hook": OFF}
    settings = _typed(source, section, CommHookConfig, values)
    options = settings.get("hook_options")
    compressor = COMPRESSORS.get(canonical_name(settings["hook"]) or "")
    if options and compressor is not None:
        known = compressor.Config
        path = _full(section, "hook_options")
        names = [each.name for each in dataclasses.fields(known)]
        _check_keys(source, path, options, names, f"hook {known.hook_name!r} has no such option")
        settings["hook_options"] = _typed(source, path, known, options)
    return settings


def _check_keys(
    source: str, section: str, values: Mapping[Any, Any], allowed: Collection[str], problem: str = "no such setting"
) -> None:
    for name in values:
        if name not in allowed:
            raise HookConfigError(
                f"{source}: {_full(section, name)}: {problem}{closest(str(name), allowed)}; "
                + (f"known are {', '.join(allowed)}" if allowed else "it has none")
            )


def _typed(source: str, section: str, config: type, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the types of the dataclass `config`."""
    where = f"{source}: {section}." if section else f"{source}: "
    try:
        made: Any = converted(config, values, where)
    except HookConfigError as error:
        if str(error).startswith(where):
            raise
        raise HookConfigError(_at_its_key(source, section, str(error))) from error  # of the right type, and invalid
    return {name: getattr(made, name) for name in values}


def _at_its_key(source: str, section: str, message: str) -> str:
    """`message` with the path of the key that it is about, in place of an argument of Python."""
    argument = re.match(r"(?:\w+: )?(\w+)=", message)
    if argument is not None:
        return f"{source}: {_full(section, argument[1])}: {message[argument.end() :]}"
    key = _full(section, "hook") if message.startswith("unknown hook") else section
    return f"{source}: {key}: {message}" if key else f"{source}: {message}"


def _full(section: str, name: object) -> str:
    return ".".join(part for part in (section, str(name)) if part)
