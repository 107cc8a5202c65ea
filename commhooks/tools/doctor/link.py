"""How fast is the network between the ranks? Asked with plain all-reduces, before anything else is measured."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.comm.collective import gather_rows

_ENOUGH_S = 0.05
_LARGEST_BYTES = 32 * 2**20
_SMALLEST_BYTES = 64 * 2**10
_REPEATS = 3


@dataclass(frozen=True)
class Link:
    """Of the slowest rank.

    Attributes:
        mbit_per_s: what a rank sends, and receives, in a ring all-reduce of one large buffer.
        latency_ms: of an all-reduce of one number.
    """

    mbit_per_s: float
    latency_ms: float


def wire_s(payload_bytes: float, mbit_per_s: float, world_size: int) -> float:
    """Seconds in which a ring all-reduce of `payload_bytes` passes a link: each rank sends 2 (W - 1) / W of it."""
    return payload_bytes * 2 * (world_size - 1) / world_size * 8 / (mbit_per_s * 1e6)


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """All ranks of `group` must call this; all get the same answer."""
    one = torch.ones(1, device=device)
    latency_s = statistics.median(_all_reduce_s(one, group) for _ in range(2 + _REPEATS))
    numbers = _SMALLEST_BYTES // 4
    while True:
        buffer = torch.ones(numbers, device=device)
        took_s = _all_reduce_s(buffer, group)
        if took_s >= _ENOUGH_S or 4 * numbers >= _LARGEST_BYTES:
            break
        numbers *= 2
    # The first one of a size touches fresh memory; the fastest has been disturbed least.
    took_s = min(took_s, *(_all_reduce_s(buffer, group) for _ in range(_REPEATS)))
    sent_s = max(took_s - latency_s, took_s / 10)
    return Link(wire_s(4 * numbers, 1.0, group.size()) / sent_s, 1000 * latency_s)


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been asked to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _all_reduce_s(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds on the slowest rank."""
    synchronize(buffer.device)
    began = time.perf_counter()
    dist.all_reduce(buffer, group=group)
    synchronize(buffer.device)
    own = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=buffer.device)
    return float(gather_rows(own, group, None, "the time of an all-reduce").max())
