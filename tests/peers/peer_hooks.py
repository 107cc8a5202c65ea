"""In the processes of a peer's test: which hook is tried, and a record of what it did."""

import os
from multiprocessing.util import Finalize

from commhooks import AllReduce, CommHook, FP16Compress, HookConfig, PowerSGD

CONFIGS: dict[str, HookConfig] = {
    "allreduce": AllReduce(),
    "fp16_compress": FP16Compress(),
    # The models are so small that no rank saves anything: the smallest rank, even so.
    "powerSGD": PowerSGD(
        matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    ),
}
HOOK, RECORD = "COMMHOOKS_PEERS_HOOK", "COMMHOOKS_PEERS_RECORD"

NAME = os.environ.get(HOOK, "")
"""Name in `CONFIGS`; empty in the run without us."""

_hooks: list[CommHook] = []


def keep(hook: CommHook) -> None:
    """Count the backward passes of `hook`. When this process ends, the sum becomes a line of the
    file RECORD.
    """
    if not _hooks:
        Finalize(None, _write_record, exitpriority=0)  # atexit does nothing in forked processes
    _hooks.append(hook)


def _write_record() -> None:
    with open(os.environ[RECORD], "a", encoding="ascii") as file:
        file.write(f"{sum(hook.stats()['backward_passes'] for hook in _hooks)}\n")
