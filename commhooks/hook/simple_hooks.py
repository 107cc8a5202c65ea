"""The bytes and the clocks of every hook but PowerSGD, which counts for itself."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from commhooks.comm.clocks import Clocks
from commhooks.comm.counters import Stats
from commhooks.compressors.config import HookConfig


def count_bytes(
    bucket: dist.GradBucket, config: HookConfig | None, wire_dtype: torch.dtype | None, stats: Stats
) -> None:
    """One all-reduce of the bucket. What a hook of the user's own sends (`config` is None), only its code knows.

    Args:
        wire_dtype: to which the hook narrows what it sends.
    """
    buffer = bucket.buffer()
    numel = buffer._values().numel() if buffer.is_sparse else buffer.numel()
    itemsize = buffer.element_size()
    stats.bytes_uncompressed += numel * itemsize
    if config is None or not config.sends:
        return
    if wire_dtype is not None and not buffer.is_sparse:
        itemsize = min(itemsize, wire_dtype.itemsize)
    stats.sent(numel, itemsize)


def run_with_clocks(
    run: Callable[[], torch.futures.Future[torch.Tensor]], device: torch.device, clocks: Clocks
) -> torch.futures.Future[torch.Tensor]:
    """Call a hook that leaves the waiting to DDP."""
    with clocks.codec(device):
        future = run()
    answered = clocks.left_to_ddp(device)

    def note(answer: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        answered()
        return answer.value()

    return future.then(note)
