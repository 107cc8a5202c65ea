"""In the processes of a peer's test: which hook is tried, and a record of what it did."""

import json
import os
from multiprocessing.util import Finalize
from pathlib import Path

from commhooks import AllReduce, CommHook, FP16Compress, HookConfig, PowerSGD

CONFIGS: dict[str, HookConfig] = {
    "allreduce": AllReduce(),
    "fp16_compress": FP16Compress(),
    # The models are so small that no rank saves anything: the smallest rank, even so.
    "powerSGD": PowerSGD(matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1),
}
HOOK, RECORD = "COMMHOOKS_PEERS_HOOK", "COMMHOOKS_PEERS_RECORD"

NAME = os.environ.get(HOOK, "")
"""Name in `CONFIGS`; empty in the run without us."""

_hooks: list[CommHook] = []
_case = ""


def keep(hook: CommHook) -> None:
    """Count what `hook` does. The sums are written when this process ends, into the folder that RECORD names."""
    if not _hooks:
        Finalize(None, _write_record, exitpriority=0)  # atexit does nothing in forked processes
    _hooks.append(hook)


def begin_case(name: str) -> None:
    """What is kept from here on belongs to this case."""
    global _case
    _case = name


def _write_record() -> None:
    stats = [hook.stats() for hook in _hooks]
    passes, compressed = (sum(each[key] or 0 for each in stats) for key in ("backward_passes", "compressed_steps"))
    file = Path(os.environ[RECORD], f"{_case or 'case'}-{os.getpid()}.json")
    file.write_text(json.dumps({"passes": passes, "compressed": compressed}))
