"""The settings of `CommHookKwargs` from outside the script, in YAML: the section `comm_hook_config` of Accelerate's
configuration file, or a file of its own (docs/accelerate.md shows both). The keys are the arguments of
`CommHookKwargs`; those that are objects in Python are strings here, and `hook: null` is DDP without a hook.

The environment variable ACCELERATE_COMM_HOOK_CONFIG names such a file. `accelerate-commhooks launch` sets it to a JSON
object, recognised by its first character "{" (write `./{...` for such a path), and requires that its settings are used:
the handler that uses them writes empty files into the folder `used`, which the launcher checks after the script.
"""

import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from accelerate_commhooks.flags import SECTION, VARIABLE
from accelerate_commhooks.requested import DDP_FIELDS
from commhooks.errors import HookConfigError
from commhooks.hook.for_plugins import (
    ARGUMENTS,
    OFF,
    closest,
    config_class,
    converted,
    import_path,
    means_no_hook,
    unresolved,
)

SECTION_OF = ", section "
"""Stands between a file and its section in the name of a source."""
NEAR = 0.7
"""A key that is so similar to `SECTION`, from 0 to 1, is a misspelt one."""
HOW_TO_WRITE = (
    "Write one with `accelerate-commhooks config FILE --hook powerSGD`, or start the script without a communication "
    "hook with `accelerate launch`"
)
LINE_TO_ADD = "accelerator = Accelerator(kwargs_handlers=[CommHookKwargs()])"
WHAT_TO_DO = f"Write `{LINE_TO_ADD}`, with `from accelerate_commhooks import CommHookKwargs`"


CommHookConfig = dataclasses.make_dataclass(
    "CommHookConfig",
    [(name, each.kind, field(default="???" if name == "hook" else each.default)) for name, each in ARGUMENTS.items()]
    # `bucket_cap_mb` is annotated as int in Accelerate 1.15, but DDP accepts fractions of a megabyte.
    + [
        (each.name, int | float if each.name == "bucket_cap_mb" else each.type, field(default=each.default))
        for each in DDP_FIELDS
    ],
)
"""The section: the arguments of all front ends, and the DDP arguments of the installed Accelerate."""
_NAMES = [each.name for each in dataclasses.fields(CommHookConfig)]
_ARGUMENT = re.compile(r"(?:\w+: )?(\w+)=")
"""How messages about an argument begin; before it may stand the class that has it."""


@dataclass(frozen=True)
class Settings:
    """Checked settings, and where they come from."""

    values: dict[str, Any]
    """The keys that are set, as plain types. Dotted paths in `hook` and `hook_state` are not imported."""
    source: str
    """The file, also with `, section comm_hook_config`, or the variable: for messages."""
    used: Path | None = None
    """The launcher's folder; None if the settings are not from the launcher."""

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> "Settings":
        """The settings in a YAML file: its section, or the whole file if there is none. Each override, "key=value" or
        "hook_options.key=value", replaces a value of the file."""
        return cls.of_file(path, load(path), overrides)

    @classmethod
    def of_file(cls, path: str | Path, loaded: Any, overrides: Iterable[str] = ()) -> "Settings":
        """As `read`, of what `load` has returned for the file."""
        section = SECTION if SECTION in loaded else ""
        if not section and ("compute_environment" in loaded or "distributed_type" in loaded):
            raise HookConfigError(
                f"{path} is a configuration of Accelerate without a section {SECTION!r}. {HOW_TO_WRITE}"
            )
        if section and (beside := [name for name in _NAMES if name in loaded]):
            raise HookConfigError(
                f"{path}: {' and '.join(beside)} beside {SECTION}, where nobody reads it: move it into the section, or "
                "remove it"
            )
        source = f"{path}{SECTION_OF}{section}" if section else str(path)
        return cls(_checked(source, _resolved(str(path), loaded, section, overrides)), source)

    @classmethod
    def from_environment(cls) -> "Settings | None":
        """What the environment variable says; None if it is not set."""
        text = os.environ.get(VARIABLE, "").strip()
        if not text:
            return None
        if not text.startswith("{"):
            try:
                return cls.read(text)
            except HookConfigError as error:
                raise HookConfigError(f"{VARIABLE}={text}: {error}") from error
        try:
            content = json.loads(text)
            used = None if content["used"] is None else Path(content["used"])
            return cls(dict(content["settings"]), content["source"], used)
        except (ValueError, TypeError, KeyError) as error:
            raise HookConfigError(
                f"{VARIABLE}={text}: expected the path of a YAML file, or what `accelerate-commhooks launch` sets; "
                "begin a path with './' if its first character is '{'"
            ) from error

    def to_environment(self) -> str:
        used = None if self.used is None else str(self.used)
        return json.dumps({"settings": self.values, "source": self.source, "used": used})

    def overridden(self, overrides: Iterable[str]) -> "Settings":
        """With overrides as in `read`."""
        from omegaconf import OmegaConf

        values = _resolved(self.source, OmegaConf.create(self.values), "", overrides)
        return dataclasses.replace(self, values=_checked(self.source, values))

    def arguments(self) -> dict[str, Any]:
        """As arguments for `CommHookKwargs`. A `hook_state` "package.module:name" is imported; a class or function is
        called without arguments to make the state."""
        arguments = dict(self.values)
        path = arguments.get("hook_state")
        if path is not None:
            found = import_path(path, f"hook_state={path!r}", kind="name")
            arguments["hook_state"] = found() if inspect.isclass(found) or inspect.isfunction(found) else found
        return arguments

    @contextlib.contextmanager
    def locating_errors(self, but: Collection[str] = ()) -> Iterator[None]:
        """Make HookConfigErrors of the body begin with the file and the key there, in place of an argument. `but`:
        arguments that are not from the file."""
        try:
            yield
        except HookConfigError as error:
            argument = _ARGUMENT.match(str(error))
            if argument is not None and (argument[1] if argument[1] in _NAMES else "hook_options") in but:
                raise
            raise _located(error, self.source) from error

    # ---- the launcher requires that its settings are used ------------------------------------------------------------

    def noting(self, what: str) -> "Settings":
        """These settings; tell the launcher "read" or "attached": that this process has read them, or has attached the
        hook. Nothing is told on another machine, where the folder does not exist."""
        if self.used is not None:
            with contextlib.suppress(OSError):
                (self.used / f"{what}.{os.getpid()}").touch()
        return self

    def noted(self, what: str, process: int | None = None) -> bool:
        """Whether the process with the id `process` (None: any process) has called `noting(what)`."""
        return self.used is not None and any(self.used.glob(f"{what}.{process or '*'}"))


NOT_FROM_OUTSIDE = Settings({}, "arguments")


def refuse_to_ignore_the_launcher(hook: object) -> None:
    """Raise HookConfigError if the launcher passed settings that no handler of this process has read. Called before a
    handler attaches a `hook` of its own."""
    from_launcher = os.environ.get(VARIABLE, "").strip().startswith("{")  # a path is only a default
    given = Settings.from_environment() if from_launcher else None
    if given is not None and given.used is not None and given.used.exists() and not given.noted("read", os.getpid()):
        raise HookConfigError(
            f"{given.source} asks for the hook {given.values['hook']!r}, and the script uses hook={hook!r} of its "
            f"own. {WHAT_TO_DO}, or start the script with `accelerate launch` and no such section"
        )


# ------------------------------------------------------------------------------------------------------------- reading


def load(path: str | Path) -> Any:
    """The content of a YAML file, as OmegaConf's `DictConfig`."""
    from omegaconf import DictConfig, OmegaConf  # a local import, because it is slow
    from omegaconf.errors import OmegaConfBaseException

    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        raise HookConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except OmegaConfBaseException as error:
        raise HookConfigError(f"{path}: {error.full_key}: {unresolved(error)}") from error
    except Exception as error:  # of PyYAML: also ValueError (`!!int abc`), AttributeError (`!!timestamp x`)
        raise HookConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        raise HookConfigError(f"{path} holds a list, not settings ('key: value')")  # OmegaConf reads nothing else
    if SECTION not in loaded and "hook" not in loaded:
        near = [key for key in map(str, loaded) if difflib.SequenceMatcher(None, key, SECTION).ratio() > NEAR]
        if near and near[0] != SECTION:  # with the value "???"
            raise HookConfigError(f"{path}: {near[0]}: the section for the hook is called {SECTION}: rename it")
    return loaded


def _resolved(source: str, loaded: Any, section: str, overrides: Iterable[str]) -> Any:
    """The settings as plain types. The whole file is resolved, because interpolations may refer to any key in it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given = list(overrides)
    for each in given:
        if not isinstance(each, str) or not each.partition("=")[0].strip() or "=" not in each:
            raise HookConfigError(f"{source}: override {each!r}; expected 'key=value' or 'hook_options.key=value'")
    try:
        if given:
            changes = OmegaConf.from_dotlist(given)
            loaded = OmegaConf.merge(loaded, {section: changes} if section else changes)
        node = loaded[section] if section else loaded
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise HookConfigError(f"{source}: {error.full_key or section}: {unresolved(error)}") from error
    except TypeError as error:  # a list in the file, and an override of a key in it
        raise HookConfigError(f"{source}: overrides {given}: the file has a list where one has a key") from error
    except yaml.YAMLError as error:
        raise HookConfigError(
            f"{source}: overrides {given}: a value is not YAML; put text with special characters in quotes, as in "
            "hook_options.exclude=['*embed*']"
        ) from error


# ------------------------------------------------------------------------------------------------------------ checking


def _checked(source: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        what = "is empty" if not values else f"is a {type(values).__name__}, not settings ('key: value')"
        where = _place(source).rstrip(": ")
        raise HookConfigError(f"{where} {what}; it needs at least 'hook: powerSGD' or another hook")
    known = config_class(values.get("hook"))
    options = () if known is None else [each.name for each in dataclasses.fields(known)]
    for name in values:
        if name in options and name not in _NAMES:
            raise HookConfigError(f"{_place(source, name)}: it is an option of the hook: move it into hook_options")
    _check_keys(source, values, _NAMES, "no such setting")
    if "hook" not in values:
        raise HookConfigError(f"{_place(source, 'hook')} is missing; it says which hook, e.g. 'powerSGD'")
    if means_no_hook(values["hook"]):
        values = values | {"hook": OFF}
    settings = _typed(source, CommHookConfig, values)
    given = settings.get("hook_options")
    if given and known is not None:
        _check_keys(source, given, options, f"hook {known.hook_name!r} has no such option", "hook_options")
        settings["hook_options"] = _typed(source, known, given, "hook_options")
    return settings


def _check_keys(source: str, values: Mapping[Any, Any], allowed: Collection[str], problem: str, *keys: str) -> None:
    for name in values:
        if name not in allowed:
            raise HookConfigError(
                f"{_place(source, *keys, str(name))}: {problem}{closest(str(name), allowed)}; "
                + (f"known are {', '.join(allowed)}" if allowed else "it has none")
            )


def _typed(source: str, config: type, values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """`values` with the types of the dataclass `config`."""
    where = _place(source, *keys, "")
    try:
        made: Any = converted(config, values, where)
    except HookConfigError as error:
        if str(error).startswith(where):
            raise
        raise _located(error, source, *keys) from error  # of the right type, and invalid
    return {name: getattr(made, name) for name in values}


def _located(error: HookConfigError, source: str, *keys: str) -> HookConfigError:
    """`error` with the place of the key that it is about, in place of an argument of Python."""
    message = str(error)
    argument = _ARGUMENT.match(message)
    if argument is not None:
        if argument[1] not in _NAMES:
            keys = ("hook_options",)
        return HookConfigError(f"{_place(source, *keys, argument[1])}: {message[argument.end() :]}")
    if message.startswith("unknown hook"):
        keys = ("hook",)
    return HookConfigError(f"{_place(source, *keys).rstrip(': ')}: {message}")


def _place(source: str, *keys: str) -> str:
    """A key of the settings of `source`, for messages: `file: comm_hook_config.hook_options.random_seed`."""
    file, _, section = source.partition(SECTION_OF)
    return f"{file}: " + ".".join([section, *keys] if section else keys)
