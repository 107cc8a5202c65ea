"""All-to-all and all-gather by messages give what gloo's own collectives give."""

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commhooks.comm import collectives
from commhooks.comm.collectives import TAG, PointToPoint, Send, resolve_group, start
from commhooks.errors import HookRunError
from tests.support.ddp_steps import limit_from_now_on, process_group_of_one

NUMELS = (1, 7, 0, 300_000, 5)


def _both_ways() -> list[bool]:
    group = dist.group.WORLD
    messages = PointToPoint()
    assert group is not None
    size = group.size()
    generator = torch.Generator().manual_seed(group.rank())
    sends = [
        Send(torch.randint(256, shape, generator=generator, dtype=torch.uint8), op=op)
        for numel in NUMELS
        for op, shape in (("all_to_all", (size, numel)), ("gather", (numel,)))
    ]
    collectives = [start(send, group, None).wait() for send in sends]
    # All of them in flight at once, and waited for in the opposite order.
    pending = [start(send, group, None, messages=messages) for send in sends]
    got = [work.wait() for work in reversed(pending)][::-1]
    return [torch.equal(a, b) for a, b in zip(got, collectives, strict=True)]


def _bytes_by_storage(tree: Any) -> dict[int, int]:
    return {
        tensor.untyped_storage().data_ptr(): tensor.nbytes
        for tensor in tree_leaves(tree)
        if isinstance(tensor, torch.Tensor)
    }


class _Largest(TorchDispatchMode):
    """Bytes of the largest memory that an operator in the body has allocated."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = _bytes_by_storage(args)
        after = _bytes_by_storage(result)
        self.size = max(
            self.size, *(size for place, size in after.items() if place not in before), 0
        )
        return result


def _different_sizes(sizes: list[int]) -> tuple[bool, int]:
    """Gather so many bytes of each rank without messages, as on an accelerator."""
    group = dist.group.WORLD
    assert group is not None
    part = torch.full((sizes[group.rank()],), group.rank(), dtype=torch.uint8)
    send = Send(
        part,
        op="gather",
        splits=([part.numel()] * group.size(), sizes),
        into=torch.zeros(sum(sizes)).byte(),
    )
    with _Largest() as largest:
        got = start(send, group, None).wait()
    return got.tolist() == [
        rank for rank, size in enumerate(sizes) for _ in range(size)
    ], largest.size


@pytest.mark.parametrize("sizes", [[3000, 0, 5000], [2000, 2000, 2000], [0, 0, 0]])
def test_parts_of_different_sizes_are_gathered_without_copies(
    run_ranks: Any, sizes: list[int]
) -> None:
    for equal, largest in run_ranks(_different_sizes, sizes, world_size=3):
        assert equal and largest <= max(sizes)


def test_nccl_gathers_parts_of_different_sizes_itself() -> None:
    """It broadcasts each part of the list, all in one work."""
    with process_group_of_one(), mock.patch.object(collectives, "backend_of", return_value="nccl"):
        into = torch.zeros(4)
        send = Send(torch.ones(4), op="gather", splits=([4], [4]), into=into)
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gather:
            assert start(send, resolve_group(), None).wait() is into and into.eq(1).all()
    (parts, _), _ = gather.call_args
    assert [part.data_ptr() for part in parts] == [into.data_ptr()]


@pytest.mark.parametrize("world_size", [1, 3])
def test_messages_give_what_gloos_collectives_give(run_ranks: Any, world_size: int) -> None:
    for equal in run_ranks(_both_ways, world_size=world_size):
        assert equal == [True] * 2 * len(NUMELS)


def _too_few() -> str:
    """Rank 1 begins two of three exchanges: rank 0 gets the time limit's error for the third."""
    group = dist.new_group([0, 1])
    messages = PointToPoint()
    for number in range(2 if dist.get_rank() == 1 else 3):
        rows = torch.full((2, 4), 10.0 * dist.get_rank() + number)
        limit_from_now_on(group, 2.5 if number == 2 else 60.0)
        pending = start(
            Send(rows, what=f"number {number}", op="all_to_all"), group, None, messages=messages
        )
        if dist.get_rank() == 0 and number == 2:
            with pytest.raises(HookRunError) as caught:
                pending.wait()
            return str(caught.value)
        if number == 0:
            assert pending.wait()[1].tolist() == [10.0] * 4
    return ""


def test_messages_are_not_taken_for_each_other(run_ranks: Any) -> None:
    text, _ = run_ranks(_too_few)
    assert "number 2" in text and "rank 0 of 2" in text


def _failed_half_way() -> list[int]:
    """Return how many messages are held after a failure, later messages and the end of a group."""
    group = dist.group.WORLD
    messages = PointToPoint()
    assert group is not None
    rows = torch.ones(3, 500_000)
    counts = []

    def held(group: dist.ProcessGroup) -> int:
        gc.collect()
        return sum(len(message.works) for message in PointToPoint.in_flight(group))

    with (
        mock.patch.object(dist, "isend", side_effect=RuntimeError("half-way")),
        pytest.raises(RuntimeError, match="half-way"),
    ):
        messages.exchange(rows.unbind(0), torch.zeros_like(rows).unbind(0), group)
    del messages
    counts.append(held(group))
    for other in range(3):  # what was received for, so that the connections are free again
        if other != dist.get_rank():
            dist.isend(rows[other], group=group, group_dst=other, tag=TAG).wait()
    messages = PointToPoint()
    answer = torch.zeros_like(rows)
    messages.exchange(rows.unbind(0), answer.unbind(0), group).wait()
    assert answer.eq(1).all()
    counts.append(held(group))
    dist.barrier()
    messages.forget_abandoned()
    counts.append(held(group))
    before = len(PointToPoint._IN_FLIGHT)
    pair = dist.new_group()
    messages.exchange(rows.unbind(0), answer.unbind(0), pair)
    counts.append(held(pair))
    dist.barrier()
    dist.destroy_process_group(pair)
    del pair
    gc.collect()
    return [*counts, len(PointToPoint._IN_FLIGHT) - before]


def test_messages_are_held_until_their_end_is_known(run_ranks: Any) -> None:
    assert run_ranks(_failed_half_way, world_size=3) == [[2, 2, 0, 4, 0]] * 3


def _abandoned() -> list[float]:
    """PointToPoint for which nobody waits arrive in their own memory, not in that of later ones."""
    group = dist.group.WORLD
    messages = PointToPoint()
    assert group is not None
    got = []
    for turn in range(3):
        rows = torch.full((2, 500_000), 10.0 * turn + dist.get_rank())
        messages.exchange(rows.unbind(0), torch.empty_like(rows).unbind(0), group)
        rows = rows + 5
        answer = torch.empty_like(rows)
        messages.exchange(rows.unbind(0), answer.unbind(0), group).wait()
        got += answer[:, 0].tolist()
        messages.forget_abandoned()
    return got


def test_abandoned_messages_change_nothing(run_ranks: Any) -> None:
    assert run_ranks(_abandoned) == [[5.0, 6.0, 15.0, 16.0, 25.0, 26.0]] * 2
