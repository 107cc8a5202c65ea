"""In the processes of a peer's test: which hook is tried, and a record of what it did."""

import datetime
import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from commhooks import AllReduce, CommHook, DiLoCo, FP16Compress, HookConfig, Int8Compress, PowerSGD

CONFIGS: dict[str, HookConfig] = {
    "allreduce": AllReduce(),
    "fp16_compress": FP16Compress(),
    # The models are so small that no rank saves anything: the smallest rank, even so.
    "powerSGD": PowerSGD(
        matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    ),
}
STATEFUL: dict[str, HookConfig] = {
    "powerSGD": CONFIGS["powerSGD"],
    "int8": Int8Compress(),
    "diloco": DiLoCo(sync_every=3),
}
"""For tests of saving and loading."""
HOOK, RECORD = "COMMHOOKS_PEERS_HOOK", "COMMHOOKS_PEERS_RECORD"

NAME = os.environ.get(HOOK, "")
"""Name in `CONFIGS` or `STATEFUL`, or of a suite; empty in the run without us."""


def config() -> HookConfig:
    """Return the tried hook."""
    return {**CONFIGS, **STATEFUL}[NAME]


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


class SharedFolder:
    """In place of `tempfile.TemporaryDirectory`: the same new folder on all ranks of torchrun."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        names = [tempfile.mkdtemp(prefix="peers-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(names)
        self.name = names[0]

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, error: Any, *_: Any) -> None:
        if error is None:
            dist.barrier()  # A rank that fails does not wait for the others.
            shutil.rmtree(self.name, ignore_errors=True)
