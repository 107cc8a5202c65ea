"""A round trip is as long on all ranks, whatever happens on one."""

import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from commhooks.comm import link
from commhooks.comm.link import LONG_ROUND_TRIP_S, round_trip_s

CPU = torch.device("cpu")


def _busy(times: list[float]) -> tuple[float, int]:
    """A round trip on ranks that are busy at first, and how often it was measured."""
    gather_rows, left = link.gather_rows, list(times)

    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(left.pop(0) if left and dist.get_rank() == 1 else 0.0)
        return gather_rows(*arguments)

    with mock.patch.object(link, "gather_rows", side_effect=slow) as calls:
        return round_trip_s(dist.group.WORLD, CPU), calls.call_count  # type: ignore[arg-type]


def test_a_round_trip_is_long_on_all_ranks_or_on_none(run_ranks: Any) -> None:
    first, second = run_ranks(_busy, [0.05, 0.05])
    assert first == second and first[0] < LONG_ROUND_TRIP_S and first[1] <= 6
    first, second = run_ranks(_busy, [0.02] * 6)
    assert first == second and first[0] >= LONG_ROUND_TRIP_S and first[1] == 6
