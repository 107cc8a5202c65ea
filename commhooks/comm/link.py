"""The network between the ranks: a model of what a collective costs on it, and how to measure it.

The model: a message costs a latency (alpha), and a byte 1 / bandwidth (beta). The ranks of a node share its network
card. What leaves a node for one collective, if it counts c bytes (see `Counters`), of W ranks, L of which are on each
node:

    all-reduce   2 (W - 1) / W c. Messages one after another: 2 (W - 1) in a ring or 2 log2(W) in a tree, whichever is
                 less: NCCL chooses, gloo has rings
    all-to-all   each rank to each rank of other nodes: 2 L (W - L) / W c, W - L messages
    all-gather   NCCL: 2 (W - 1) / W c, a ring: W - 1 messages; gloo: as an all-to-all (`point_to_point.py`)
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from commhooks.comm.collective import Op, gather_rows

Backend = Literal["nccl", "gloo"]

_ENOUGH_S = 0.05
LARGEST_BYTES = 32 * 2**20
SMALLEST_BYTES = 64 * 2**10
_REPEATS = 3


@dataclass(frozen=True)
class Network:
    """The model.

    Attributes:
        ranks: how many reduce together.
        bits_per_s: bandwidth of a node.
        latency_s: seconds per message.
        per_node: how many of the ranks are on each node.
        backend: what carries the collectives.
    """

    ranks: int
    bits_per_s: float
    latency_s: float = 0.0
    per_node: int = 1
    backend: Backend = "nccl"

    def leaving(self, counted: float, ops: Sequence[Op] = ("sum",)) -> float:
        """Bytes that leave a node for collectives of so many counted bytes, divided equally among `ops`."""
        return sum(2 * self._shares(op) / self.ranks * counted / len(ops) for op in ops)

    def seconds(self, counted: float, ops: Sequence[Op] = ("sum",), buckets: int = 1) -> float:
        """The time of the collectives of a step, one after another: `ops` for each bucket."""
        messages = buckets * sum(map(self.messages, ops))
        return 8 * self.leaving(counted, ops) / self.bits_per_s + messages * self.latency_s

    def _shares(self, op: Op) -> int:
        """How many of the W shares of a message leave the node, there and back."""
        return self.per_node * (self.ranks - self.per_node) if self._to_each(op) else self.ranks - 1

    def messages(self, op: Op) -> int:
        """How many follow one another in one collective."""
        if self._to_each(op):
            return self.ranks - self.per_node
        if op == "gather":
            return self.ranks - 1
        tree = math.ceil(math.log2(self.ranks)) if self.backend == "nccl" else self.ranks
        return 2 * min(self.ranks - 1, tree)

    def _to_each(self, op: Op) -> bool:
        """Whether each rank sends to each other one."""
        return op == "all_to_all" or (op == "gather" and self.backend == "gloo")


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


def bandwidth(mbit_per_s: float) -> str:
    """The bandwidth as text with a unit."""
    rounded = float(f"{mbit_per_s:.2g}")
    return f"{rounded / 1000:g} Gbit/s" if rounded >= 1000 else f"{rounded:g} Mbit/s"


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure the link. All ranks of `group` must call this; all get the same result."""
    began = time.perf_counter()
    one = torch.ones(1, device=device)
    latency_s = statistics.median(_all_reduce_s(one, group) for _ in range(2 + _REPEATS))
    buffer = torch.ones(SMALLEST_BYTES // 4, device=device)
    took_s = _all_reduce_s(buffer, group)
    while took_s < enough_s(latency_s) and buffer.nbytes < LARGEST_BYTES:
        larger = _twice(buffer, group)
        if larger is None:
            break
        buffer, took_s = larger, _all_reduce_s(larger, group)
    # The first all-reduce of a size uses fresh memory; the fastest one was disturbed least.
    took_s = min(took_s, *(_all_reduce_s(buffer, group) for _ in range(_REPEATS)))
    mbit_per_s = Network(group.size(), 1e6).seconds(buffer.nbytes) / without_latency_s(took_s, latency_s)
    return Link(mbit_per_s, 1000 * latency_s, _slowest(time.perf_counter() - began, group, device))


def enough_s(latency_s: float) -> float:
    """How long a message has to take to show a bandwidth, and not the latency."""
    return max(_ENOUGH_S, 8 * latency_s)


def without_latency_s(took_s: float, latency_s: float) -> float:
    """What the bytes of a message took: a tenth of its time, at least."""
    return max(took_s - latency_s, took_s / 10)


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


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes, with all that it queues on the device."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def _all_reduce_s(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one all-reduce on the slowest rank."""
    own = seconds_of(lambda: dist.all_reduce(buffer, group=group), buffer.device)
    return _slowest(own, group, buffer.device)


def _slowest(own: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest number of any rank; the same on all."""
    row = torch.tensor([own], dtype=torch.float64, device=device)
    return float(gather_rows(row, group, None, "the time of an all-reduce").max())
