"""Pass settings to a script in the environment variable ACCELERATE_COMM_HOOK_CONFIG.

It holds a path, or a JSON object, recognised by its first character "{" (write `./{...` for such a path):

    comm_hook.yaml                                    set by users; a file as in `yaml_config`
    {"settings": {...}, "source": ..., "used": ...}   set by `accelerate-commhooks launch`

The launcher requires that its settings are used. A handler that uses them writes two empty files into the folder
`used`, which the launcher checks after the script has ended: `read.PID` when the handler reads the settings,
`attached.PID` when it attaches the hook to a model.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_commhooks.yaml_config import read_settings, source_of
from commhooks.errors import HookConfigError

VARIABLE = "ACCELERATE_COMM_HOOK_CONFIG"

LINE_TO_ADD = "accelerator = Accelerator(kwargs_handlers=[CommHookKwargs()])"
_WHAT_TO_DO = f"Write `{LINE_TO_ADD}`, with `from accelerate_commhooks import CommHookKwargs`"


@dataclass(frozen=True)
class HandedOver:
    """Settings from the environment."""

    settings: dict[str, Any]
    source: str
    """The file or variable from which the settings come, for messages."""
    used: Path | None = None
    """The launcher's folder; None if the settings are not from the launcher."""

    def to_environment(self) -> str:
        used = None if self.used is None else str(self.used)
        return json.dumps({"settings": self.settings, "source": self.source, "used": used})

    def note(self, what: str) -> None:
        """Write an empty file for the launcher. Does nothing on another machine, where the folder does not exist."""
        if self.used is not None:
            with contextlib.suppress(OSError):
                (self.used / f"{what}.{os.getpid()}").touch()

    def noted(self, what: str, process: int | None = None) -> bool:
        """Whether the process with the id `process` (None: any process) has called `note(what)`."""
        pattern = f"{what}.{'*' if process is None else process}"
        return self.used is not None and any(self.used.glob(pattern))


def handed_over() -> HandedOver | None:
    """The settings in the environment variable; None if that is not set.

    Raises:
        HookConfigError: the variable is invalid, or names a file with invalid settings.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.startswith("{"):
        try:
            return HandedOver(read_settings(text), source=source_of(text))
        except HookConfigError as error:
            raise HookConfigError(f"{VARIABLE}={text}: {error}") from error
    try:
        content = json.loads(text)
        used = None if content["used"] is None else Path(content["used"])
        return HandedOver(dict(content["settings"]), content["source"], used)
    except (ValueError, TypeError, KeyError) as error:
        raise HookConfigError(
            f"{VARIABLE}={text}: expected the path of a YAML file, or what `accelerate-commhooks launch` sets; "
            "begin a path with './' if its first character is '{'"
        ) from error


def refuse_to_ignore_the_launcher(hook: object) -> None:
    """Check that the settings of the launcher were used. Called before a handler that did not read them attaches its
    own `hook`.

    Raises:
        HookConfigError: `accelerate-commhooks launch` passed settings and no handler has read them.
    """
    if not os.environ.get(VARIABLE, "").strip().startswith("{"):
        return  # a path is only a default for handlers without a hook
    given = handed_over()
    if given is not None and given.used is not None and given.used.exists() and not given.noted("read", os.getpid()):
        raise HookConfigError(
            f"{given.source} asks for the hook {given.settings['hook']!r}, and the script uses hook={hook!r} of its "
            f"own. {_WHAT_TO_DO}, or start the script with `accelerate launch` and no such section"
        )


def unused(script: str, given: HandedOver, several_processes: bool) -> str | None:
    """The error message for a script that has ended without using the settings; None if it has used them.

    Args:
        several_processes: whether models should have been wrapped in DDP; then the hook must have been attached.
    """
    if not given.noted("read"):
        return f"{script} has not used the hook {given.settings['hook']!r} that {given.source} asks for. {_WHAT_TO_DO}"
    if several_processes and not given.noted("attached"):
        return (
            f"{script} has attached the hook {given.settings['hook']!r} that {given.source} asks for to no model: its "
            f"CommHookKwargs() was not given to an Accelerator that wraps a model in DDP. {_WHAT_TO_DO}, and let "
            "`accelerator.prepare` wrap the model; start a script that only evaluates without such a section"
        )
    return None
