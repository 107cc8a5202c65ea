"""A rank that has ended or hangs is named by all others, also by those that communicate only with ranks that failed in
turn."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.comm import lost_ranks
from commhooks.comm.collective import gather_rows
from commhooks.comm.groups import new_group
from commhooks.gradients.torch_private import timeout_of
from tests.support.models import mlp


def _error(group: dist.ProcessGroup) -> str:
    """What this rank reads in a collective; then it ends, too."""
    with pytest.raises(commhooks.HookRunError) as caught:
        gather_rows(torch.zeros(1000), group, None, "what is tested")
    dist.destroy_process_group()
    return str(caught.value)


def _one_of_four_ends() -> str:
    world = dist.group.WORLD
    gather_rows(torch.zeros(1), world, None, "the start")
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    return _error(world)


def test_all_name_the_rank_that_has_ended(run_ranks: Any) -> None:
    texts = run_ranks(_one_of_four_ends, world_size=4)
    for rank in (0, 2, 3):  # rank 3 communicates with rank 0 and 2 only
        assert texts[rank].startswith(
            f"rank {rank} of 4: the exchange of what is tested failed: rank 1 has ended or hangs;"
        )


def _in_groups() -> str:
    """Rank 0 ends; rank 1 is in a group with it and in one with rank 2."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    for group in (first, second):
        if rank in dist.get_process_group_ranks(group):
            gather_rows(torch.zeros(1), group, None, "the start")
    if rank == 0:
        dist.destroy_process_group()
        return ""
    return _error(first if rank == 1 else second)


def test_a_rank_in_another_group_is_named(run_ranks: Any) -> None:
    _, near, far = run_ranks(_in_groups, world_size=3)
    assert near.startswith("rank 1 of 3 (rank 1 of 2 in its group): ") and "failed: rank 0 has ended or hangs" in near
    assert far.startswith("rank 2 of 3 (rank 1 of 2 in its group): ") and "failed: rank 0 has ended or hangs" in far


def _without_store(how: str) -> tuple[str, float]:
    def find(*_: object) -> list[int]:
        if how == "stopped":
            time.sleep(60)
        raise RuntimeError("Connection reset by peer")

    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return "", 0.0
    with mock.patch.object(lost_ranks._Notes, "find", find):
        started = time.monotonic()
        return _error(dist.group.WORLD), time.monotonic() - started


@pytest.mark.parametrize("how", ["stopped", "gone"])
def test_without_the_store_nothing_hangs(run_ranks: Any, how: str) -> None:
    (text, seconds), _ = run_ranks(_without_store, how)
    assert "rank 1 has ended or hangs" in text
    assert seconds < 10


def _simple_hook() -> str:
    ddp = DistributedDataParallel(mlp(8, 2))
    commhooks.attach(ddp, "fp16")
    ddp(torch.ones(1, 8)).sum().backward()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return ""
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(1, 8)).sum().backward()
    return str(caught.value)


def test_hooks_that_return_at_once_name_it_too(run_ranks: Any) -> None:
    text, _ = run_ranks(_simple_hook)
    assert "rank 0 of 2: the exchange of bucket 0 failed: rank 1 has ended or hangs" in text


def test_a_group_of_ones_own_has_the_limit_of_the_models() -> None:
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        assert timeout_of(new_group([0], dist.group.WORLD), torch.device("cpu")) == limit
    finally:
        dist.destroy_process_group()
