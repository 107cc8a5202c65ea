"""What reaches a script from outside: the environment variable ACCELERATE_COMM_HOOK_CONFIG.

It holds a path, or a JSON object, which begins with "{" as no path does (write `./{` for one that would):

    comm_hook.yaml                                    set by users; a file as in `yaml_config`
    {"settings": {...}, "source": ..., "used": ...}   set by `accelerate-commhooks launch`

The launcher insists that its settings are used. A handler that uses them leaves two empty files in the folder `used`,
which the launcher looks for when the script has ended: `read.PID` when it takes the settings, `attached.PID` when a
model gets the hook.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_commhooks.yaml_config import read_settings
from commhooks.errors import HookConfigError

VARIABLE = "ACCELERATE_COMM_HOOK_CONFIG"

LINE_TO_ADD = "accelerator = Accelerator(kwargs_handlers=[CommHookKwargs()])"
_WHAT_TO_DO = f"Write `{LINE_TO_ADD}`, with `from accelerate_commhooks import CommHookKwargs`"


@dataclass(frozen=True)
class HandedOver:
    """Settings from the environment."""

    settings: dict[str, Any]
    source: str
    """Where they were written."""
    used: Path | None = None
    """The launcher's folder, if they come from it."""

    def to_environment(self) -> str:
        used = None if self.used is None else str(self.used)
        return json.dumps({"settings": self.settings, "source": self.source, "used": used})

    def note(self, what: str) -> None:
        """Leave a file for the launcher. On another machine than the launcher's there is no such folder."""
        if self.used is not None:
            with contextlib.suppress(OSError):
                (self.used / f"{what}.{os.getpid()}").touch()

    def noted(self, what: str, process: int | None = None) -> bool:
        """Whether `process`, or any process, has noted it."""
        pattern = f"{what}.{'*' if process is None else process}"
        return self.used is not None and any(self.used.glob(pattern))


def handed_over() -> HandedOver | None:
    """What the environment holds; None if it holds nothing.

    Raises:
        HookConfigError: it holds something else, or a file with wrong settings.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if not text.startswith("{"):
        try:
            return HandedOver(read_settings(text), source=text)
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
    """Called before a handler that took nothing from the environment attaches its own `hook`.

    Raises:
        HookConfigError: `accelerate-commhooks launch` handed settings over and no handler has taken them.
    """
    if not os.environ.get(VARIABLE, "").strip().startswith("{"):
        return  # a path is a default for handlers without a hook of their own
    given = handed_over()
    if given is not None and given.used is not None and given.used.exists() and not given.noted("read", os.getpid()):
        raise HookConfigError(
            f"{given.source} asks for the hook {given.settings['hook']!r}, and the script uses hook={hook!r} of its "
            f"own. {_WHAT_TO_DO}, or start the script with `accelerate launch` and no such section"
        )


def unused(script: str, given: HandedOver, several_processes: bool) -> str | None:
    """The sentence about a script that has ended without using the settings; None if it has used them.

    Args:
        several_processes: whether models were to be wrapped in DDP: then the hook must have been attached.
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
