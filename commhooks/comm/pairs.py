"""Measure the connections between single pairs of ranks, one after another."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.comm.collective import collective_error
from commhooks.comm.link import LARGEST_BYTES, SMALLEST_BYTES, enough_s, seconds_of, without_latency_s

MOST = 66
"""Pairs that are measured: those of 12 ranks. Each takes a quarter of a second on a fast network."""
_PINGS = 5


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
    while took_s < enough_s(round_trip_s) and size < LARGEST_BYTES:
        size *= 2
        took_s = there_and_back_s(size)
    took_s = min(took_s, there_and_back_s(size))
    _send(torch.tensor([0]), other, group, device)  # the end
    return 8e-6 * size / without_latency_s(took_s, round_trip_s), 500 * round_trip_s


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
