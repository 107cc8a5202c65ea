"""Metrics of hooks, for the loggers of Lightning and Accelerate."""

import weakref
from typing import Any

from commhooks.hook.comm_hook import CommHook

PREFIX = "commhooks"

LATEST = (
    "chosen_at",
    "outer_gradient_norm",
    "outer_gradient_cosine",
    "members",
    "members_steps_per_s",
    "members_weight",
    "members_waited_s",
)
"""Keys of `stats()` that are metrics as they are. With most hooks their values are None."""
NAMES = (
    "bytes_sent",
    "bytes_per_pass",
    "compression_rate",
    "compressed_steps",
    "nonfinite_steps",
    "codec_ms",
    "waiting_ms",
    "residual_norm",
    "gradient_norm",
    "residual_over_gradient",
    *LATEST,
)
"""Names of the metrics; docs/working.md explains each."""
_SO_FAR = ("bytes_sent", "compressed_steps", "nonfinite_steps")


class Meter:
    """Computes metrics of hooks. Rates are means since the previous `read` of the same hook."""

    def __init__(self) -> None:
        self._before: weakref.WeakKeyDictionary[CommHook, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[type["Meter"], tuple[()]]:
        # Hooks cannot be pickled, and Lightning's spawn launcher pickles its callbacks.
        return Meter, ()

    def read(self, hook: CommHook, *, prefix: str = PREFIX) -> dict[str, float]:
        now = hook.stats()
        before = self._before.get(hook, {})
        self._before[hook] = now
        values: dict[str, float | None] = {name: now["so_far"][name] for name in _SO_FAR}
        values |= {name: now[name] for name in LATEST} | hook.norms()
        passes = now["backward_passes"] - before.get("backward_passes", 0)
        for name, of, unit in (
            ("bytes_per_pass", "bytes_sent", 1),
            ("codec_ms", "codec_s", 1000),
            ("waiting_ms", "waiting_s", 1000),
        ):
            if now[of] is not None and passes:
                values[name] = unit * (now[of] - (before.get(of) or 0)) / passes
        sent = (now["bytes_sent"] or 0) - (before.get("bytes_sent") or 0)
        if sent:
            values["compression_rate"] = (
                now["bytes_uncompressed"] - before.get("bytes_uncompressed", 0)
            ) / sent
        return {
            f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None
        }
