"""Measure the network: what all ranks reach together, and the connections between single pairs of them."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.comm.collectives import collective_error, gather_rows
from commhooks.tools.measuring import seconds_of

LARGEST_BYTES = 32 * 2**20
SMALLEST_BYTES = 64 * 2**10
MOST = 66
"""Pairs that are measured: those of 12 ranks. Each takes a quarter of a second on a fast network."""
_ENOUGH_S = 0.05
_REPEATS = 3
_PINGS = 5


def bandwidth(mbit_per_s: float) -> str:
    """The bandwidth as text with a unit."""
    rounded = float(f"{mbit_per_s:.2g}")
    return f"{rounded / 1000:g} Gbit/s" if rounded >= 1000 else f"{rounded:g} Mbit/s"


# ---- all ranks together ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """The network as measured on the slowest rank.

    Attributes:
        mbit_per_s: rate at which a rank sends, and receives, in a ring all-reduce of one large buffer.
        latency_ms: time of an all-reduce of one number.
    """

    mbit_per_s: float
    latency_ms: float


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Measure the link. All ranks of `group` must call this; all get the same result."""
    one = torch.ones(1, device=device)
    latency_s = statistics.median(_all_reduce_s(one, group) for _ in range(2 + _REPEATS))
    buffer = torch.ones(SMALLEST_BYTES // 4, device=device)
    took_s = _all_reduce_s(buffer, group)
    while took_s < _enough_s(latency_s) and buffer.nbytes < LARGEST_BYTES:
        larger = _twice(buffer, group)
        if larger is None:
            break
        buffer, took_s = larger, _all_reduce_s(larger, group)
    # The first all-reduce of a size uses fresh memory; the fastest one was disturbed least.
    took_s = min(took_s, *(_all_reduce_s(buffer, group) for _ in range(_REPEATS)))
    sent = 2 * (group.size() - 1) / group.size() * buffer.nbytes
    mbit_per_s = 8e-6 * sent / _without_latency_s(took_s, latency_s)
    return Link(mbit_per_s, 1000 * latency_s)


def _enough_s(latency_s: float) -> float:
    """How long a message has to take to show a bandwidth, and not the latency."""
    return max(_ENOUGH_S, 8 * latency_s)


def _without_latency_s(took_s: float, latency_s: float) -> float:
    """What the bytes of a message took: a tenth of its time, at least."""
    return max(took_s - latency_s, took_s / 10)


def _twice(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor | None:
    """A buffer of twice the size; None on all ranks if one of them has no memory for it."""
    try:
        larger = torch.ones(2 * buffer.numel(), device=buffer.device)
    except RuntimeError:  # torch.OutOfMemoryError is one
        larger = None
    return None if _slowest(float(larger is None), group, buffer.device) else larger


def _all_reduce_s(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one all-reduce on the slowest rank."""
    own = seconds_of(lambda: dist.all_reduce(buffer, group=group), buffer.device)
    return _slowest(own, group, buffer.device)


def _slowest(own: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The largest number of any rank; the same on all."""
    row = torch.tensor([own], dtype=torch.float64, device=device)
    return float(gather_rows(row, group, None, "the time of an all-reduce").max())


# ---- pairs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """
    Attributes:
        ranks: of the group.
        mbit_per_s: rate of one large message from the first to the second.
        latency_ms: half the time of one number there and back.
    """

    ranks: tuple[int, int]
    mbit_per_s: float
    latency_ms: float


def pairs_to_measure(machines: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """All pairs of ranks; if these are too many, one of each two machines and one inside; if these are too many, too,
    each machine with the next. `machines`: the ranks of each."""
    every = list(itertools.combinations(sorted(itertools.chain(*machines)), 2))
    if len(every) <= MOST:
        return every
    firsts = [ranks[0] for ranks in machines]
    between = list(itertools.combinations(firsts, 2))
    if len(between) > MOST:
        between = [*itertools.pairwise(firsts)]
    inside = [(ranks[0], ranks[1]) for ranks in machines[:1] if len(ranks) > 1]
    return between + inside


def measure_pairs(pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup, device: torch.device) -> list[Pair]:
    """Measure these pairs. All ranks of `group` must call this; all get the same result.

    Raises:
        HookRunError: another rank has failed, or did not take part within the process group's timeout.
    """
    found = []
    for one, other in pairs:
        row = torch.zeros(2, dtype=torch.float64, device=device)
        try:
            if group.rank() == one:
                row.copy_(torch.tensor(_ask(other, group, device)))
            elif group.rank() == other:
                _answer(one, group, device)
            dist.broadcast(row, group=group, group_src=one)  # the others wait here: one pair at a time
        except RuntimeError as error:
            raise collective_error(f"messages between rank {one} and rank {other}", group, error) from error
        rate, latency = row.tolist()
        found.append(Pair((one, other), rate, latency))
    return found


def _ask(other: int, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Mbit/s and ms, measured by the first rank of a pair."""

    def there_and_back(size: int) -> None:
        _send(torch.tensor([size]), other, group, device)
        _send(torch.zeros(size // 4), other, group, device)
        _receive(torch.zeros(1), other, group, device)

    def there_and_back_s(size: int) -> float:
        return seconds_of(lambda: there_and_back(size), device)

    round_trip_s = statistics.median([there_and_back_s(4) for _ in range(1 + _PINGS)][1:])
    size, took_s = SMALLEST_BYTES, there_and_back_s(SMALLEST_BYTES)
    while took_s < _enough_s(round_trip_s) and size < LARGEST_BYTES:
        size *= 2
        took_s = there_and_back_s(size)
    took_s = min(took_s, there_and_back_s(size))
    _send(torch.tensor([0]), other, group, device)  # the end
    return 8e-6 * size / _without_latency_s(took_s, round_trip_s), 500 * round_trip_s


def _answer(one: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """What the second rank of a pair does meanwhile."""
    while size := int(_receive(torch.zeros(1, dtype=torch.int64), one, group, device)):
        _receive(torch.zeros(size // 4), one, group, device)
        _send(torch.zeros(1), one, group, device)


def _send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup, device: torch.device) -> None:
    dist.send(tensor.to(device), group=group, group_dst=to)


def _receive(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    tensor = tensor.to(device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor
