"""Read the settings of `CommHookKwargs` from YAML.

They are the section `comm_hook_config` of Accelerate's configuration file, or a separate file. The
keys are the arguments of `CommHookKwargs`. Hooks and states are strings here, and `hook: null` is
DDP without a hook.

The environment variable ACCELERATE_COMM_HOOK_CONFIG holds the path of such a file.
`accelerate-commhooks launch` sets it to a JSON object, recognised by its first character "{" (a
path that begins with it is written `./{...`), with the settings and the path of a file for the
message that the launcher prints after the run.
"""

import contextlib
import dataclasses
import inspect
import json
import os
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from accelerate import DistributedDataParallelKwargs
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from commhooks.errors import HookConfigError, did_you_mean, errors_begin_with, no_such
from commhooks.hook.plugin_api import (
    ARGUMENTS,
    OFF,
    HookRequest,
    check_arguments,
    converted,
    import_path,
    means_no_hook,
    plain,
)

SECTION = "comm_hook_config"
"""The key of the section in Accelerate's configuration file."""
VARIABLE = "ACCELERATE_COMM_HOOK_CONFIG"
"""The environment variable with the path of a file, or with the settings themselves."""
STOCK_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")
"""The fields of Accelerate's handler that select one of torch's hooks."""
DDP_FIELDS = [
    f for f in dataclasses.fields(DistributedDataParallelKwargs) if f.name not in STOCK_HOOK_FIELDS
]

_DDP_TYPES = typing.get_type_hints(DistributedDataParallelKwargs)
TYPES: dict[str, Any] = (
    {name: argument.kind for name, argument in ARGUMENTS.items()}
    | {option.name: _DDP_TYPES[option.name] for option in DDP_FIELDS}
    # Accelerate 1.15 annotates it as int, but DDP accepts fractions of a megabyte.
    | {"bucket_cap_mb": int | float}
)
"""Setting -> type: the arguments of commhooks, and the DDP arguments of the installed Accelerate.
"""


@dataclass(frozen=True)
class Settings:
    values: dict[str, Any]
    """The keys that are set, as plain types. Dotted paths in `hook` and `hook_state` are not
    imported.
    """
    source: str
    """The file in messages, with `, section comm_hook_config` if it has one."""
    message_file: Path | None = None
    """A file for the message that the launcher prints after the run; None without the launcher."""

    @classmethod
    def read(cls, path: str | Path, overrides: Iterable[str] = ()) -> "Settings":
        """Read a YAML file: its section, or the whole file if there is none.

        Each override, "key=value" or "hook_options.key=value", replaces a value of the file.
        """
        loaded = _load(path)
        section = SECTION if SECTION in loaded else ""
        if not section and ("compute_environment" in loaded or "distributed_type" in loaded):
            raise HookConfigError(f"{path}: {no_section(map(str, loaded))}")
        if outside := [name for name in ARGUMENTS if section and name in loaded]:
            raise HookConfigError(
                f"{path}: {' and '.join(outside)} outside {SECTION}: move it into the section"
            )
        source = f"{path}, section {section}" if section else str(path)
        return cls(_typed(source, _merged(str(path), loaded, section, overrides)), source)

    @classmethod
    def find(cls, path: str | Path | None, overrides: Iterable[str]) -> "Settings":
        """Read a file, or without a path the environment variable; see `read`.

        Raises HookConfigError if neither is given.
        """
        if isinstance(overrides, str):
            raise HookConfigError(
                f"overrides={overrides!r} is a str; expected a list of str 'key=value'"
            )
        overrides = list(overrides)
        settings = cls.from_environment(overrides) if path is None else cls.read(path, overrides)
        if settings is None:
            raise HookConfigError(
                f"CommHookKwargs.from_config() without a path, and {VARIABLE} is not set. Pass a"
                " path, set the environment variable to one, or start the script with"
                " `accelerate-commhooks launch`"
            )
        return settings

    @classmethod
    def from_environment(cls, overrides: Iterable[str] = ()) -> "Settings | None":
        """Read the environment variable, with overrides as in `read`; None if it is not set."""
        text = os.environ.get(VARIABLE, "").strip()
        if not text:
            return None
        if not text.startswith("{"):
            try:
                return cls.read(text, overrides)
            except HookConfigError as error:
                raise HookConfigError(f"{VARIABLE}={text}: {error}") from error
        try:
            content = json.loads(text)
            values = dict(content["settings"])
            source = content["source"]
            file = content["message_file"]
        except (ValueError, TypeError, KeyError) as error:
            raise HookConfigError(
                f"{VARIABLE}={text}; expected the path of a YAML file, with './' before a name that"
                " begins with '{'"
            ) from error
        if overrides:
            values = _typed(source, _merged(source, OmegaConf.create(values), "", overrides))
        return cls(values, source, None if file is None else Path(file))

    def to_environment(self) -> str:
        file = None if self.message_file is None else str(self.message_file)
        return json.dumps({"settings": self.values, "source": self.source, "message_file": file})

    def check(self, *, imports: bool = True) -> None:
        """Raise HookConfigError for invalid settings. `imports`: whether to import a hook given by
        its dotted path, and check its options. False in the launcher, because only the workers have
        the script's folder in `sys.path`.
        """
        common = {name: value for name, value in self.values.items() if name in ARGUMENTS}
        with self.errors_name_source():
            if imports or ":" not in common["hook"]:
                HookRequest.parse(**common)
            else:
                check_arguments(common)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `CommHookKwargs`.

        A `hook_state` "package.module:name" is imported; a class or function is called without
        arguments to make the state.
        """
        arguments = dict(self.values)
        path = arguments.get("hook_state")
        if path is not None:
            state = import_path(path, f"hook_state={path!r}", kind="name")
            makes_state = inspect.isclass(state) or inspect.isfunction(state)
            arguments["hook_state"] = state() if makes_state else state
        return arguments

    def message(self, text: str, *, first: bool = False) -> None:
        """Make the launcher print `text` after the run; "" prints nothing.

        `first`: keep an earlier text, which is replaced otherwise.
        """
        if self.message_file is not None:
            # The folder does not exist on other machines, nor after the launcher has ended.
            with (
                contextlib.suppress(OSError),
                open(self.message_file, "x" if first else "w", encoding="utf-8") as file,
            ):
                file.write(text)

    @property
    def attached_to_no_model(self) -> str:
        return (
            f"the hook {self.values['hook']!r} of {self.source} was attached to no model."
            f" {LINE_TO_ADD}"
        )

    def errors_name_source(self) -> contextlib.AbstractContextManager[None]:
        return errors_begin_with(self.source, HookConfigError)


LINE_TO_ADD = (
    "Write `CommHookKwargs().attach(accelerator)` before `accelerator.prepare(...)`, with `from"
    " accelerate_commhooks import CommHookKwargs`. In place of transformers' Trainer take"
    " CommHookTrainer from accelerate_commhooks.transformers"
)
"""Advice for users whose script does not use the settings."""


def no_section(keys: Iterable[str]) -> str:
    return f"no section {SECTION!r}{did_you_mean(SECTION, keys)}"


# --------------------------------------------------------------------------------------------------
# reading


def _load(path: str | Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        raise HookConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except OmegaConfBaseException as error:  # an interpolation that cannot be parsed
        raise HookConfigError(f"{path}: {error.full_key}: {str(error).splitlines()[0]}") from error
    except Exception as error:
        # PyYAML also raises ValueError (`!!int abc`) and AttributeError (`!!timestamp x`).
        raise HookConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        # OmegaConf reads nothing else
        raise HookConfigError(f"{path} is a list; expected settings ('key: value')")
    return loaded


def _merged(source: str, loaded: DictConfig, section: str, overrides: Iterable[str]) -> Any:
    """Return `loaded` or its section, with the overrides, as plain types.

    Interpolations see the whole file.
    """
    overrides = list(overrides)
    for text in overrides:
        if not isinstance(text, str) or not text.partition("=")[0].strip() or "=" not in text:
            raise HookConfigError(
                f"{source}: override {text!r}; expected 'key=value' or 'hook_options.key=value'"
            )
    try:
        changes: Any = OmegaConf.from_dotlist(overrides)
        if section:
            changes = {section: changes}
        merged: Any = OmegaConf.merge(loaded, changes) if overrides else loaded
        return plain(source, merged[section] if section else merged)
    except OmegaConfBaseException as error:
        raise HookConfigError(
            f"{source}: {error.full_key or section}: {str(error).splitlines()[0]}"
        ) from error
    except TypeError as error:  # a list in the file, and an override of a key in it
        raise HookConfigError(
            f"{source}: overrides {overrides}: the file has a list where an override has a key"
        ) from error
    except yaml.YAMLError as error:
        raise HookConfigError(
            f"{source}: overrides {overrides}: {' '.join(str(error).split())}"
        ) from error


def _typed(source: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        what = f"is a {type(values).__name__}" if values else "is empty"
        raise HookConfigError(
            f"{source} {what}; expected at least 'hook: powerSGD' or another hook"
        )
    for name in values:
        if name not in TYPES:
            names = TYPES if "hook" in values else [*TYPES, SECTION]
            raise no_such(source, "setting", str(name), names)
    if "hook" not in values and values.get("shards") is None:
        raise HookConfigError(f"{source}: hook is missing; expected its name, e.g. 'powerSGD'")
    if means_no_hook(values.get("hook")):
        values = values | {"hook": OFF}
    return {
        name: converted(f"{source}: {name}", value, TYPES[name]) for name, value in values.items()
    }
