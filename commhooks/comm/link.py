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
        took_s: seconds that measuring took.
    """

    mbit_per_s: float
    latency_ms: float
    took_s: float = 0.0


def wire_s(payload_bytes: float, mbit_per_s: float, world_size: int) -> float:
    """Seconds to send a ring all-reduce of `payload_bytes` over a link: each rank sends 2 (W - 1) / W of the bytes."""
    return payload_bytes * 2 * (world_size - 1) / world_size * 8 / (mbit_per_s * 1e6)


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure the link. All ranks of `group` must call this; all get the same result."""
    began = time.perf_counter()
    one = torch.ones(1, device=device)
    latency_s = statistics.median(_all_reduce_s(one, group) for _ in range(2 + _REPEATS))
    buffer = torch.ones(_SMALLEST_BYTES // 4, device=device)
    while True:
        took_s = _all_reduce_s(buffer, group)
        if took_s >= _ENOUGH_S or buffer.nbytes >= _LARGEST_BYTES:
            break
        larger = _twice(buffer, group)
        if larger is None:
            break
        buffer = larger
    # The first all-reduce of a size uses fresh memory; the fastest one was disturbed least.
    took_s = min(took_s, *(_all_reduce_s(buffer, group) for _ in range(_REPEATS)))
    sent_s = max(took_s - latency_s, took_s / 10)
    mbit_per_s = wire_s(buffer.nbytes, 1.0, group.size()) / sent_s
    return Link(mbit_per_s, 1000 * latency_s, _slowest(time.perf_counter() - began, group, device))


def _twice(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor | None:
    """A buffer of twice the size; None on all ranks if one of them has no memory for it."""
    try:
        larger = torch.ones(2 * buffer.numel(), device=buffer.device)
    except RuntimeError:  # torch.OutOfMemoryError is one
        larger = None
    return None if _slowest(float(larger is None), group, buffer.device) else larger


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
    return _slowest(time.perf_counter() - began, group, buffer.device)


def _slowest(own: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest number of any rank; the same on all."""
    row = torch.tensor([own], dtype=torch.float64, device=device)
    return float(gather_rows(row, group, None, "the time of an all-reduce").max())
