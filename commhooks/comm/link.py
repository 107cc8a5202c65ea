"""Measure the network between the ranks with a few plain all-reduces."""

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
    """The network as measured on the slowest rank.

    Attributes:
        mbit_per_s: rate at which a rank sends, and receives, in a ring all-reduce of one large buffer.
        latency_ms: time of an all-reduce of one number.
    """

    mbit_per_s: float
    latency_ms: float


def wire_s(payload_bytes: float, mbit_per_s: float, world_size: int) -> float:
    """Seconds to send a ring all-reduce of `payload_bytes` over a link: each rank sends 2 (W - 1) / W of the bytes."""
    return payload_bytes * 2 * (world_size - 1) / world_size * 8 / (mbit_per_s * 1e6)


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure the link. All ranks of `group` must call this; all get the same result."""
    one = torch.ones(1, device=device)
    latency_s = statistics.median(_all_reduce_s(one, group) for _ in range(2 + _REPEATS))
    numbers = _SMALLEST_BYTES // 4
    while True:
        buffer = torch.ones(numbers, device=device)
        took_s = _all_reduce_s(buffer, group)
        if took_s >= _ENOUGH_S or 4 * numbers >= _LARGEST_BYTES:
            break
        numbers *= 2
    # The first all-reduce of a size uses fresh memory; the fastest one was disturbed least.
    took_s = min(took_s, *(_all_reduce_s(buffer, group) for _ in range(_REPEATS)))
    sent_s = max(took_s - latency_s, took_s / 10)
    return Link(wire_s(4 * numbers, 1.0, group.size()) / sent_s, 1000 * latency_s)


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _all_reduce_s(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one all-reduce on the slowest rank."""
    synchronize(buffer.device)
    began = time.perf_counter()
    dist.all_reduce(buffer, group=group)
    synchronize(buffer.device)
    own = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=buffer.device)
    return float(gather_rows(own, group, None, "the time of an all-reduce").max())
