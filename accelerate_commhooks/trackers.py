"""The metrics of hooks, for the trackers of an accelerator."""

import weakref
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from commhooks import CommHook, HookRunError
from commhooks.hook.for_plugins import PREFIX, Meter


class TrackedHooks:
    """Reads the metrics of a handler's hooks; means are since the previous call for the same hook."""

    def __init__(self) -> None:
        self._meters: weakref.WeakKeyDictionary[CommHook, Meter] = weakref.WeakKeyDictionary()

    def read(self, hook: CommHook, **how: Any) -> dict[str, float]:
        """The metrics of `hook`; for the arguments see `Meter.read`."""
        return self._meters.setdefault(hook, Meter()).read(hook, **how)

    def log(self, accelerator: Accelerator, hooks: Sequence[CommHook], step: int | None, *, per_layer: bool) -> None:
        """See `CommHookKwargs.log`."""
        if not accelerator.trackers:
            missing = "" if accelerator.log_with else "Accelerator(log_with=...) with a tracker that is installed, and "
            raise HookRunError(
                f"CommHookKwargs.log: this accelerator has no trackers; it needs {missing}a call of "
                "accelerator.init_trackers(...) before"
            )
        values: dict[str, float] = {}
        for number, hook in enumerate(hooks):
            values |= self.read(hook, per_layer=per_layer, prefix=f"{PREFIX}/{number}" if number else PREFIX)
        if values:
            accelerator.log(values, step=step)
