"""Behind a long link small messages of several buckets go out as one: no bit changes, and a step has fewer rounds."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from commhooks.comm.link import LONG_ROUND_TRIP_S
from commhooks.engine import coalescing
from commhooks.gradients import weights
from tests.support.features import fully_shard_on_gloo
from tests.support.kinds import KINDS, START, Kind
from tests.support.sharded import POWERSGD, attached, backward, random_gradients
from tests.support.training import Run, make_model, residuals

STEPS = START + 3
SUMS = ("powerSGD", "powerSGD, fp16 wrapper", "powerSGD, bf16 wrapper", "random_k")
QUANTISED = ("int8, native", "int4, torch")


@contextlib.contextmanager
def round_trip(seconds: float) -> Iterator[Any]:
    with mock.patch.object(coalescing, "round_trip_s", return_value=seconds) as measured:
        yield measured


def _facts(run: Run) -> list[torch.Tensor]:
    return [run.weights(), *run.gradients, *residuals(run.hook).values()]


def _collectives(run: Run) -> int:
    return int(run.hook.stats()["collectives_last_pass"])


def _near_and_far(name: str, **more: Any) -> dict[str, Any]:
    kind = KINDS[name]
    with round_trip(0.0) as measured:
        near = kind.new(**more).train(STEPS)
    with round_trip(0.05):
        far = kind.new(**more).train(STEPS)
    return {
        "near": _facts(near),
        "far": _facts(far),
        "collectives": (_collectives(near), _collectives(far)),
        "bytes": [each.hook.stats()["bytes_sent_last_pass"] for each in (near, far)],
        "last": far.hook.stats()["last_issued"],
        "measured": measured.call_count,
    }


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _outer_steps() -> list[tuple[list[torch.Tensor], int]]:
    found = []
    for seconds in (0.0, 0.05):
        with round_trip(seconds), mock.patch.object(weights, "BUCKET_BYTES", 2000):
            run = Kind("diloco", {"sync_every": 2}).new().train(4)
        found.append((_facts(run), run.hook.stats()["collectives"]))
    return found


def test_the_messages_of_an_outer_step_wait_for_each_other(run_ranks: Any) -> None:
    """Those of its wire, so also among more than two ranks."""
    for near, far in run_ranks(_outer_steps, world_size=3):
        assert _same(near[0], far[0]) and far[1] <= near[1] / 2


@pytest.mark.parametrize("name", [*SUMS, *QUANTISED])
def test_a_long_link_changes_no_bit_and_takes_a_round_for_all_buckets(run_ranks: Any, name: str) -> None:
    for rank in run_ranks(_near_and_far, name):
        assert _same(rank["far"], rank["near"]) and rank["measured"] == 1
        near, far = rank["collectives"]
        # Sums, quantised shares and their means are messages of their own in each of two rounds at most.
        assert far <= 4 and near >= 2 * far
        assert rank["bytes"][0] == rank["bytes"][1]
        assert "buckets 0, 1, 2" in rank["last"] and f"at step {STEPS - 1}" in rank["last"]


def test_sums_of_three_ranks_wait_only_where_the_user_says_so(run_ranks: Any) -> None:
    """The order of three summands would depend on a time that was measured. What is moved only is the same."""
    for rank in run_ranks(_three_ranks, world_size=3):
        sums, moved, asked = rank
        assert sums["measured"] == 0 and sums["collectives"][0] == sums["collectives"][1]
        assert moved["collectives"][1] < moved["collectives"][0]
        assert _same(moved["far"], moved["near"]) and _same(sums["far"], sums["near"])
        assert asked["collectives"] == 4  # for P and for Q: the shares of the sum, and the sum
        assert asked["equal on all ranks"]
        assert not torch.equal(asked["weights"], sums["near"][0])
        assert torch.allclose(asked["weights"], sums["near"][0], rtol=0, atol=1e-5)


def _three_ranks() -> tuple[Any, Any, Any]:
    asked = Kind("powerSGD", {**KINDS["powerSGD"].options, "coalesce": True}).new().train(STEPS)
    weights = asked.weights()
    all_weights = [torch.empty_like(weights) for _ in range(3)]
    dist.all_gather(all_weights, weights)
    of_asked = {
        "weights": weights,
        "collectives": _collectives(asked),
        "equal on all ranks": all(torch.equal(each, weights) for each in all_weights),
    }
    return _near_and_far("powerSGD"), _near_and_far("int8, torch"), of_asked


def _off() -> tuple[int, int]:
    """Not where the user has said so, nor for messages that take longer than the round trip."""
    with round_trip(0.05) as measured:
        off = Kind("powerSGD", {**KINDS["powerSGD"].options, "coalesce": False}).new().train(STEPS)
        assert measured.call_count == 0
    with round_trip(LONG_ROUND_TRIP_S), mock.patch.object(coalescing, "BYTES_PER_S", 100.0 / LONG_ROUND_TRIP_S):
        large = KINDS["powerSGD"].new().train(STEPS)
    return _collectives(off), _collectives(large)


def test_messages_that_do_not_wait(run_ranks: Any) -> None:
    for off, large in run_ranks(_off):
        assert 4 < large <= off


class _Stop(Exception):
    pass


def _troubled(name: str, seconds: float, find_unused: bool) -> list[torch.Tensor]:
    """A step that is not finite on one rank, and a backward pass that ends in an exception after half of its buckets;
    then a new DDP goes on."""
    kind, ddp = KINDS[name], {"find_unused_parameters": find_unused}
    with round_trip(seconds):
        run = kind.new(ddp=ddp).train(STEPS - 1)
        run.optimizer.zero_grad()
        images = torch.full((8, 1, 8, 8), float("nan") if dist.get_rank() == 0 else 0.5)
        run.ddp(images).square().sum().backward()
        assert run.hook.stats()["nonfinite_steps"] == 1
        run.train(1)

        def stop(_: torch.Tensor) -> None:
            raise _Stop

        handle = run.ddp.module[3].weight.register_hook(stop)
        with pytest.raises(_Stop):
            run.train(1)
        handle.remove()
        resumed = kind.new(model=make_model(), ddp=ddp).load(run.save(residual="per_rank"))
        return _facts(resumed.train(2))


@pytest.mark.parametrize("name", ["powerSGD", "int8, torch"])
def test_what_is_held_back_is_dropped_with_its_pass(run_ranks: Any, name: str) -> None:
    near, far = (run_ranks(_troubled, name, seconds, name == "powerSGD") for seconds in (0.0, 0.05))
    for one, other in zip(near, far, strict=True):
        assert _same(one, other)


@pytest.mark.parametrize("name", ["powerSGD", "int8, torch"])
def test_between_nodes(run_ranks: Any, name: str) -> None:
    """What the ranks of a node send each other does not wait."""
    ranks = run_ranks(_near_and_far, name, world_size=4, ranks_per_node=2)
    assert all(_same(rank["far"], rank["near"]) for rank in ranks)
    near, far = (sum(rank["collectives"][i] for rank in ranks) for i in (0, 1))
    assert near >= 1.5 * far


def _sharded(seconds: float) -> tuple[list[torch.Tensor], int]:
    with round_trip(seconds):
        model, hook = attached(2, 2, hook_options=POWERSGD)
        gradients = [each for step in range(4) for each in backward(model, random_gradients(step)).values()]
    return gradients, hook.stats()["collectives_last_pass"]


@fully_shard_on_gloo
def test_between_the_replicas_of_a_sharded_model(run_ranks: Any) -> None:
    near, far = (run_ranks(_sharded, seconds, world_size=4) for seconds in (0.0, 0.05))
    for (expected, before), (got, after) in zip(near, far, strict=True):
        assert _same(got, expected) and after < before
