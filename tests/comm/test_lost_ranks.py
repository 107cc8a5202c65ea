"""All other ranks name a rank that has ended or hangs, even if they never communicate with it."""

import contextlib
import gc
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.comm.collectives import PointToPoint, gather_rows
from commhooks.comm.groups import _Notes, new_group
from commhooks.gradients.torch_private import timeout_of
from tests.support import features
from tests.support.ddp_steps import limit_from_now_on
from tests.support.models import mlp


def _end(groups: list[dist.ProcessGroup]) -> None:
    """Close the connections of this rank: that happens when nothing holds the groups any more."""
    groups.clear()
    dist.destroy_process_group()
    gc.collect()


def _fail_and_end(groups: list[dist.ProcessGroup]) -> str:
    """What this rank reads in a collective of the last of the groups; then it ends, too."""
    text = ""
    started = time.monotonic()
    try:
        gather_rows(torch.zeros(1000), groups[-1], None, "what is tested")
    except commhooks.HookRunError as error:
        text = str(error)
    assert time.monotonic() - started < 18  # not by the limit of the group
    _end(groups)
    return text


def _one_of_four_ends() -> str:
    groups = [dist.group.WORLD]
    gather_rows(torch.zeros(1), groups[0], None, "the start")
    return "" if dist.get_rank() == 1 and _end(groups) is None else _fail_and_end(groups)


def test_all_name_the_rank_that_has_ended(run_ranks: Any) -> None:
    texts = run_ranks(_one_of_four_ends, world_size=4)
    for rank in (0, 2, 3):  # rank 3 communicates with rank 0 and 2 only
        named = (
            f"rank {rank} of 4: the exchange of what is tested failed: rank 1 has ended or hangs;"
        )
        assert texts[rank].startswith(named)


def _in_groups() -> str:
    """Rank 0 ends; rank 1 is in a group with it and in one with rank 2."""
    rank = dist.get_rank()
    made = [dist.new_group(ranks, timeout=timedelta(seconds=20)) for ranks in ([0, 1], [1, 2])]
    groups = [made[1], made[0]] if rank == 1 else [made[rank // 2]]
    del made
    for group in reversed(groups) if rank == 1 else groups:
        gather_rows(torch.zeros(1), group, None, "the start")
    del group
    return "" if rank == 0 and _end(groups) is None else _fail_and_end(groups)


def test_a_rank_in_another_group_is_named(run_ranks: Any) -> None:
    _, near, far = run_ranks(_in_groups, world_size=3)
    assert (
        near.startswith("rank 1 of 3 (rank 1 of 2 in its group): ")
        and "failed: rank 0 has ended or hangs" in near
    )
    assert (
        far.startswith("rank 2 of 3 (rank 1 of 2 in its group): ")
        and "failed: rank 0 has ended or hangs" in far
    )


def _another_failure() -> str:
    """Rank 2 ends, the others go on in a group of their own, and then rank 1 ends."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.group.WORLD]
    gather_rows(torch.zeros(1), groups[-1], None, "the start")
    if rank == 2:
        _end(groups)
        return ""
    gather_rows(torch.zeros(1), groups[0], None, "the start")
    with contextlib.suppress(commhooks.HookRunError):
        gather_rows(torch.zeros(1000), groups.pop(), None, "what is tested")
    return "" if rank == 1 and _end(groups) is None else _fail_and_end(groups)


def test_a_rank_that_goes_on_names_nobody_of_an_earlier_failure(run_ranks: Any) -> None:
    text = run_ranks(_another_failure, world_size=3)[0]
    assert "failed: another rank has probably ended, hangs, or sends something else" in text


def _without_store(how: str) -> str:
    def find(*_: object) -> list[int]:
        if how == "stopped":
            time.sleep(60)
        raise RuntimeError("Connection reset by peer")

    groups = [dist.group.WORLD]
    gather_rows(torch.zeros(1), groups[0], None, "the start")
    if dist.get_rank() == 1:
        _end(groups)
        return ""
    with mock.patch.object(_Notes, "find", find):
        return _fail_and_end(groups)


@pytest.mark.parametrize("how", ["stopped", "gone"])
def test_without_the_store_nothing_hangs(run_ranks: Any, how: str) -> None:
    text, _ = run_ranks(_without_store, how)
    assert "rank 1 has ended or hangs" in text


def _simple_hook() -> str:
    ddp = DistributedDataParallel(mlp(8, 2))
    commhooks.attach(ddp, "fp16")
    for _ in range(3):  # DDP itself communicates in the first two
        ddp(torch.ones(1, 8)).sum().backward()
    if dist.get_rank() == 1:
        del ddp
        _end([])
        return ""
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(1, 8)).sum().backward()
    return str(caught.value)


def test_hooks_that_return_at_once_name_it_too(run_ranks: Any) -> None:
    text, _ = run_ranks(_simple_hook)
    assert "rank 0 of 2: the exchange of bucket 0 failed: rank 1 has ended or hangs" in text


def _another_collective() -> list[str]:
    ddp = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    )
    hook = commhooks.attach(ddp, "fp16")
    for _ in range(3):
        ddp(torch.ones(2, 8)).sum().backward()
    if dist.get_rank() == 1:
        del ddp
        _end([])
        return []
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(2, 8)).sum().backward()
        dist.all_reduce(torch.ones(1))
    assert not isinstance(caught.value, commhooks.HookRunError)
    hook.failed(caught.value)
    return getattr(caught.value, "__notes__", [])


def test_an_error_of_another_collective_gets_a_note(run_ranks: Any) -> None:
    notes, _ = run_ranks(_another_collective)
    expected = ["commhooks: rank 1 has ended or hangs; look at the output there"]
    assert notes == (expected if sys.version_info >= (3, 11) else [])


LIMIT_S = 2.0
HOOKS = {
    "int8": {},
    "bf16": {},
    "powerSGD": {"start_powerSGD_iter": 1},
    "diloco": {"sync_every": 4},
}


def _waits(hook: str, group: dist.ProcessGroup, folder: Path) -> float | None:
    """Rank 2 hangs in the middle of a backward pass. Returns the seconds that each of the others
    waits in all.
    """
    ddp = DistributedDataParallel(mlp(32, 4), process_group=group, bucket_cap_mb=0.001)
    commhooks.attach(ddp, hook, hook_options=HOOKS[hook])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def hang(*_: object) -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    def train(steps: int) -> None:
        for _ in range(steps):
            ddp(torch.ones(1, 32)).sum().backward()
            optimizer.step()

    train(4)
    limit_from_now_on(group, LIMIT_S)
    if dist.get_rank() == 2:
        ddp.module[2].register_full_backward_hook(hang)
        with contextlib.suppress(KeyboardInterrupt):
            train(1)
        return None
    began = time.monotonic()
    with (
        mock.patch("commhooks.comm.groups.TIMED_OUT_LIMIT_S", 0.1),
        pytest.raises(RuntimeError, match="exchange of"),
    ):
        train(4)
    waited = time.monotonic() - began
    (folder / str(dist.get_rank())).touch()
    return waited


def _each_waits(folder: Path) -> dict[str, float | None]:
    waited = {}
    for hook in HOOKS:
        (folder / hook).mkdir(exist_ok=True)
        waited[hook] = _waits(hook, dist.new_group(), folder / hook)
    return waited


@features.limit_of_a_group
def test_the_others_wait_for_one_timeout_with_every_hook(run_ranks: Any, tmp_path: Path) -> None:
    for waited in run_ranks(_each_waits, tmp_path, world_size=3)[:2]:
        assert all(LIMIT_S / 2 < seconds < 1.75 * LIMIT_S for seconds in waited.values()), waited


def _messages() -> float:
    """Rank 0 sends late, and rank 2 does not send at all: rank 1 waits for them in this order."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    rank = dist.get_rank()
    began = time.monotonic()
    sent, arriving = [torch.ones(4) for _ in range(3)], [torch.zeros(4) for _ in range(3)]
    time.sleep({0: 0.75 * LIMIT_S, 1: 0.0, 2: 2.5 * LIMIT_S}[rank])
    if rank < 2:
        messages = PointToPoint().exchange(sent, arriving, group)
        with pytest.raises(RuntimeError):
            messages.wait()
    return time.monotonic() - began


def test_the_messages_of_a_collective_share_one_timeout(run_ranks: Any) -> None:
    assert 0.9 * LIMIT_S < run_ranks(_messages, world_size=3)[1] < 1.5 * LIMIT_S


def test_a_group_of_ones_own_has_the_limit_of_the_models() -> None:
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        assert (
            timeout_of(new_group([[0]], dist.group.WORLD, torch.device("cpu")), torch.device("cpu"))
            == limit
        )
    finally:
        dist.destroy_process_group()
