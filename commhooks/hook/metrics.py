"""The metrics of a hook as a flat dict of floats, with the names that Lightning's and Accelerate's loggers show.
Computed only on request, which `CommHookMonitor` and `CommHookKwargs.log` make every so many steps.

| name | meaning |
|---|---|
| `commhooks/bytes_sent` | bytes passed to collectives so far by this rank |
| `commhooks/bytes_per_pass` | the same per backward pass, mean since the last reading |
| `commhooks/compression_rate` | bytes that plain DDP would have sent / bytes sent, since the last reading |
| `commhooks/compressed_steps` | steps that were compressed and committed so far |
| `commhooks/nonfinite_steps` | steps that were not committed, because a number was inf or NaN on some rank, so far |
| `commhooks/codec_ms` | mean milliseconds in the hook per backward pass without waiting (on CUDA: device time) |
| `commhooks/waiting_ms` | mean milliseconds of waiting for the network per backward pass |
| `commhooks/chosen_at` | step at which the present choice of `auto` came into force |
| `commhooks/residual_norm` | norm of this rank's residual, in units of the unscaled loss |
| `commhooks/gradient_norm` | norm of the averaged gradient of the same parameters at the time of the reading |
| `commhooks/residual_over_gradient` | residual norm / gradient norm: about how many steps of gradient are held back |
| `commhooks/outer_gradient_norm` | `diloco`, `local_sgd`: how far the mean weights moved in the latest outer step |
| `commhooks/outer_gradient_cosine` | between the latest two of these movements: above 0, outer momentum may help |
| `commhooks/cosine` | cosine of compressed and true mean gradient, if a pass was sampled since the last reading |
| `commhooks/layers/PARAMETER/NAME` | the last four per parameter |

"So far" includes the runs before a resume. Values that do not exist are omitted: bytes and times of a user's hook,
times on accelerators other than CUDA (where the host only queues the work), residuals of hooks that have none, gradient
norms after `zero_grad`.
"""

import weakref
from typing import Any

from commhooks.hook.comm_hook import CommHook

PREFIX = "commhooks"

NAMES = (
    "bytes_sent",
    "bytes_per_pass",
    "compression_rate",
    "compressed_steps",
    "nonfinite_steps",
    "codec_ms",
    "waiting_ms",
    "chosen_at",
    "residual_norm",
    "gradient_norm",
    "residual_over_gradient",
    "outer_gradient_norm",
    "outer_gradient_cosine",
    "cosine",
)
"""All metrics except those per parameter."""


class Meter:
    """Reads the metrics of hooks repeatedly and computes means since the last reading of the same hook."""

    def __init__(self) -> None:
        self._before: weakref.WeakKeyDictionary[CommHook, dict[str, Any]] = weakref.WeakKeyDictionary()

    def read(self, hook: CommHook, *, per_layer: bool = False, prefix: str = PREFIX) -> dict[str, float]:
        """The metrics listed above. Synchronises with the accelerator, but does not communicate: a single rank may call
        it."""
        now, before = hook.stats(), self._before.get(hook, {})
        self._before[hook] = now
        sampled = now["cosine"] is not None and now["cosine_pass"] != before.get("cosine_pass")
        values: dict[str, float | None] = {
            **{name: now["so_far"][name] for name in ("bytes_sent", "compressed_steps", "nonfinite_steps")},
            **{name: now[name] for name in ("chosen_at", "outer_gradient_norm", "outer_gradient_cosine")},
            **hook.norms(),
            "cosine": now["cosine"] if sampled else None,
        }
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
            values["compression_rate"] = (now["bytes_uncompressed"] - before.get("bytes_uncompressed", 0)) / sent
        for parameter, layer in hook.layers().items() if per_layer else ():
            for name, value in layer.items():
                if name != "cosine" or sampled:
                    values[f"layers/{parameter}/{name}"] = value
        return {f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None}
