"""What may go wrong in a round of `diloco` and `local_sgd`: numbers that are not finite, ranks that
would miss each other or have come apart, saves in threads, a process that ends while a fragment is
in flight.
"""

import contextlib
import gc
import itertools
import subprocess
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import commhooks
from commhooks.comm import collectives
from commhooks.gradients import precision
from commhooks.gradients.torch_private import store_of
from commhooks.local_steps import flat_weights
from commhooks.local_steps.outer_steps import OuterSteps
from tests.support import warm
from tests.support.ddp_steps import log_lines
from tests.support.training import Run, batch, flat


def _after_a_bad_gradient(
    config: commhooks.HookConfig, optimizer: type[torch.optim.Optimizer], steps: int
) -> Any:
    """The second pass of rank 1 has a gradient that is not finite, which its optimizer takes in."""
    run = Run.new(hook=config)
    run.optimizer = optimizer(run.ddp.parameters(), lr=0.01)  # type: ignore[call-arg]
    for step in range(steps):
        images, labels = batch(step, dist.get_rank())
        run.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run.ddp(images), labels)
        (loss * (torch.nan if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
        run.optimizer.step()
    run.hook.synchronize(optimizers=True)
    return run.weights(), run.hook.stats(), run.optimizer.state_dict()["state"][0]


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        (commhooks.DiLoCo(sync_every=3), torch.optim.Adagrad),
        (commhooks.DiLoCo(sync_every=4, fragments=2, delay=1), torch.optim.AdamW),
    ],
    ids=["at once", "streaming"],
)
def test_later_rounds_are_finite_again(run_ranks, config, optimizer):
    first, second = run_ranks(_after_a_bad_gradient, config, optimizer, 9)
    assert torch.equal(first[0], second[0]) and first[0].isfinite().all()
    assert first[1]["nonfinite_steps"] == 1 and first[1]["step"] >= 2
    assert all(each.isfinite().all() for each in second[2].values())


@mock.patch.object(flat_weights, "BUFFER_BYTES", 1000)
def _bad_rounds(every: int, rounds: int, bad_at: int) -> Any:
    """After the first round, a weight of rank 1 is not finite after step `bad_at` of each. The last
    buffer has it.
    """
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every)).train(every)
    good, steps = run.weights(), itertools.count(1)

    @torch.no_grad()
    def spoil(*_: Any) -> None:  # before the outer step
        if next(steps) % every == bad_at % every and dist.get_rank() == 1:
            next(run.ddp.parameters())[0] = torch.nan

    run.optimizer.register_step_post_hook(spoil)
    with log_lines("commhooks") as lines:
        run.train(rounds * every)
    return good, run.weights(), run.hook.stats(), [line for line in lines if "is discarded" in line]


@pytest.mark.parametrize(
    "bad_at", [1, 3]
)  # after the last step of a round only one buffer is not finite
def test_a_round_with_a_rank_that_is_not_finite_is_discarded(run_ranks, bad_at):
    found = run_ranks(_bad_rounds, 3, 2, bad_at)
    for good, after, stats, _ in found:
        assert torch.equal(good, after)
        assert (stats["nonfinite_steps"], stats["step"]) == (2, 1)
    assert [len(lines) for *_, lines in found] == [1, 0]  # once, on one rank


def _saved_with_bad_weights_in_flight() -> tuple[int, int, bool]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=3, delay=2))

    @torch.no_grad()
    def spoil(*_: Any) -> None:  # before they are sent
        if dist.get_rank() == 1:
            next(run.ddp.parameters())[0] = torch.nan

    run.optimizer.register_step_post_hook(spoil)
    run.train(1).hook.synchronize()
    stats = run.hook.stats()
    return stats["nonfinite_steps"], stats["step"], bool(run.weights().isfinite().all())


def test_what_is_in_flight_is_discarded_alone(run_ranks):
    """A save applies it first: the weights are those of the anchor again, which all ranks
    exchange.
    """
    assert run_ranks(_saved_with_bad_weights_in_flight) == [(1, 1, True)] * 2


def _refused(how: str) -> str:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=2))
    try:
        if how == "zero":
            run.optimizer = ZeroRedundancyOptimizer(run.ddp.parameters(), torch.optim.SGD, lr=0.1)
            run.train(1)
        else:
            with run.ddp.join():
                run.train(0 if how == "only shadows" and dist.get_rank() == 0 else 2)
    except commhooks.HookRunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("zero", "ZeroRedundancyOptimizer steps each parameter on one rank only"),
        ("join", "join() with a hook that averages weights"),
        ("only shadows", "join() with a hook that averages weights"),
    ],
)
def test_ranks_that_would_miss_each_other_are_refused(run_ranks, how, text):
    for said in run_ranks(_refused, how):
        assert text in said


def _in_inference_mode() -> tuple[torch.Tensor, torch.Tensor]:
    """As frameworks call it before a validation, in the first round and later."""
    run = Run.new(hook=commhooks.DiLoCo(sync_every=3, outer_momentum=0.5))
    same = Run.new(hook=commhooks.DiLoCo(sync_every=3, outer_momentum=0.5))
    for _ in range(2):
        same.train(2).hook.synchronize(optimizers=True)
        run.train(2)
        no_group = mock.patch.object(
            dist, "ProcessGroupGloo", side_effect=AssertionError("a group of its own")
        )
        with torch.inference_mode(), no_group:
            run.hook.synchronize(optimizers=True)
    return run.train(4).weights(), same.train(4).weights()


def test_a_round_may_end_in_inference_mode(run_ranks):
    for run, same in run_ranks(_in_inference_mode):
        assert torch.equal(run, same)


def _collects_another() -> int:
    """A model of before is found to be garbage in the middle of an outer step, which is in that of
    an optimizer.
    """
    gone: list[Any] = [Run.new(hook="local_sgd").train(1)]
    gone.append(gone)
    runner = weakref.ref(gone[0].hook._hook)
    run, exchange = Run.new(hook=commhooks.LocalSGD(sync_every=1)), OuterSteps.exchange
    third = Run.new(hook="local_sgd")  # told of the step after `run`
    del gone

    def collecting(*args: Any) -> None:
        gc.collect()
        exchange(*args)

    gc.disable()
    try:
        alive = runner() is not None
        with mock.patch.object(OuterSteps, "exchange", collecting):
            run.train(2)
    finally:
        gc.enable()
    assert alive and runner() is None
    return run.hook.stats()["step"] + third.hook.stats()["step"]


def test_another_hook_may_end_within_an_outer_step(run_ranks):
    assert run_ranks(_collects_another) == [2, 2]


def _lost_rank() -> tuple[torch.Tensor, dict[str, Any]]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=3), loss_scale=lambda: 1.0)
    run.train(4)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(run.ddp.parameters())[0] = torch.nan
    run.train(6)
    return run.weights(), run.hook.stats()


def test_a_rank_whose_weights_are_not_finite_ends_the_round_though_its_gradients_never_are(
    run_ranks,
):
    """With a scaler a round waits for a pass after which all ranks step."""
    for weights, stats in run_ranks(_lost_rank):
        assert weights.isfinite().all()
        assert stats["nonfinite_steps"] == 1 and stats["step"] >= 2


def _attached_again() -> tuple[float, float, list[str]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.register_buffer("graph", torch.eye(4).to_sparse())
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def attach() -> commhooks.CommHook:
        return commhooks.attach(
            model, commhooks.LocalSGD(sync_every=3), replicate_group=mesh["replicate"]
        )

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)) - 5 * dist.get_rank()).square().mean().backward()
            optimizer.step()

    def spread() -> float:
        ranks = [torch.empty(0)] * 2
        dist.all_gather_object(ranks, flat(p.to_local() for p in model.parameters()))
        return float((ranks[0] - ranks[1]).abs().max())

    hook = attach()
    train(5)
    hook.close()
    apart = spread()
    with log_lines("commhooks") as lines:
        attach()
        train(3)
    return apart, spread(), [line for line in lines if "the weights differ between ranks" in line]


def test_replicas_that_were_left_in_mid_round_begin_from_their_mean(run_ranks):
    found = run_ranks(_attached_again)
    for apart, after, _ in found:
        assert apart > 0.01 and after == 0
    assert [len(lines) for *_, lines in found] == [1, 0]


def _raises() -> Any:
    raise MemoryError


def _one_rank_differs(config: commhooks.HookConfig, how: str) -> tuple[bool, torch.Tensor]:
    """Rank 1 does something else between the backward pass and the step, or skips the step."""
    run = Run.new(hook=config).train(1)
    saved = run.save()
    for step in range(1, 4):
        images, labels = batch(step, dist.get_rank())
        run.optimizer.zero_grad()
        nn.functional.cross_entropy(run.ddp(images), labels).backward()
        differs = dist.get_rank() == 1
        if differs and how == "forward":
            run.ddp(images)
        with run.ddp.no_sync():
            if differs and how == "forward in no_sync":
                run.ddp(images)
            if how == "accumulates":
                nn.functional.cross_entropy(run.ddp(images), labels).backward()
        if not (differs and how.startswith("skips")):
            with contextlib.suppress(MemoryError):
                run.optimizer.step(_raises if differs and how == "its step raises" else None)
    if how == "skips and loads":
        run.load(saved).train(1)
    return run.hook.synchronize(), run.weights()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "how",
    [
        "forward",
        "forward in no_sync",
        "accumulates",
        "skips",
        "skips and loads",
        "its step raises",
    ],
)
def test_ranks_are_equal_after_synchronize_whatever_one_has_done_before_its_step(
    run_ranks, delay, how
):
    """The save after the first step has ended a round, so that the last pass is that of one."""
    config = commhooks.DiLoCo(sync_every=3, delay=delay)
    (equal, weights), (also, others) = run_ranks(_one_rank_differs, config, how)
    assert equal and also and torch.equal(weights, others)


def _unequal_passes(more: int) -> tuple[list[bool], list[str]]:
    """Rank 0 has just ended a round."""
    run = Run.new(hook=commhooks.LocalSGD(sync_every=2)).train(2)
    equal = [run.hook.synchronize(), run.hook.synchronize()]
    run.train(2 + (more if dist.get_rank() else 0))
    with log_lines("commhooks") as lines:
        equal.append(run.hook.synchronize())
    return equal, [line for line in lines if "the ranks have made 4 and 5 backward passes" in line]


def test_a_rank_that_has_made_more_passes_than_the_others_is_noticed(run_ranks):
    """As with data loaders of unequal lengths; also by the rank that has fewer."""
    (first, lines), (second, more) = run_ranks(_unequal_passes, 1, timeout_s=20)
    assert first == second == [True, True, False] and len(lines + more) == 1
    assert run_ranks(_unequal_passes, 0) == [([True, True, True], [])] * 2


def _saves_in_a_thread() -> tuple[bool, list[str], torch.Tensor]:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=3)).train(4)
    saved: list[dict[str, Any]] = []
    with log_lines("commhooks") as lines:
        thread = threading.Thread(target=lambda: saved.append(run.hook.state_dict()))
        thread.start()
        run.train(4)
        thread.join()
    run.hook.synchronize()
    return (
        saved[0]["exact"],
        [line for line in lines if "outside of the training thread" in line],
        run.weights(),
    )


def test_a_save_in_another_thread_does_not_disturb_the_training(run_ranks):
    found = run_ranks(_saves_in_a_thread)
    for exact, lines, weights in found:
        assert not exact and len(lines) == 1 and torch.equal(weights, found[0][2])


def _loads_while_a_part_is_on_its_way() -> tuple[float, int, int, int]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=4, delay=3))
    run.train(4)
    saved = run.save()
    store = store_of(dist.group.WORLD)
    if dist.get_rank() == 1:
        store.wait(["rank 0 loads"])
        time.sleep(1.0)
    run.train(1)
    began = time.monotonic()
    if dist.get_rank() == 0:
        store.set("rank 0 loads", "")
    with mock.patch("commhooks.local_steps.outer_steps.ABANDONED_LIMIT_S", 0.1):
        run.load(saved)
    seconds = time.monotonic() - began
    at_load = run.hook.stats()["step"]
    time.sleep(1.0 if dist.get_rank() == 0 else 0.0)
    later = run.hook.stats()["step"]
    run.train(8)
    run.hook.synchronize()
    return seconds, at_load, later, run.hook.stats()["step"]


def test_what_is_on_its_way_does_not_count_as_a_step_of_the_loaded_state(run_ranks):
    (seconds, at_load, later, end), (_, *other) = run_ranks(_loads_while_a_part_is_on_its_way)
    assert at_load == later and end > later and other == [at_load, later, end]
    # rank 0 has waited for rank 1: its next collectives come after those of the lost exchange
    assert seconds > 0.3


def _precision_in(hook: commhooks.HookConfig) -> set[str]:
    """What a training that multiplies in bfloat16 has while the hook sends."""
    (switch, *_), seen, start = precision._PRECISION_SWITCHES, set(), collectives.start
    before = switch.fp32_precision

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.add(switch.fp32_precision)
        return start(*args, **kwargs)

    switch.fp32_precision = "bf16"
    try:
        with mock.patch.object(collectives, "start", noted):
            Run.new(hook=hook).train(4)
    finally:
        switch.fp32_precision = before
    return seen


def test_an_outer_step_leaves_the_precision_of_products_to_the_training(run_ranks):
    """It may run in a thread, and the switch is that of the process."""
    assert run_ranks(_precision_in, commhooks.DiLoCo(sync_every=2, delay=1)) == [{"bf16"}] * 2
    assert run_ranks(_precision_in, commhooks.PowerSGD(start_powerSGD_iter=1)) == [{"ieee"}] * 2


ENDS_EARLY = """
import time, torch, torch.distributed as dist, commhooks
from commhooks.local_steps.exchange import OuterExchange

def slow(exchange):
    time.sleep(0.3)
    print("arrived", flush=True)

OuterExchange._exchange = slow
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=2, delay=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2)).backward()
optimizer.step()
"""


def test_a_process_that_ends_waits_for_what_is_on_its_way():
    """A thread that is stopped within a collective of gloo aborts the process."""
    ended = subprocess.run(
        [warm.python(), "-c", ENDS_EARLY], capture_output=True, text=True, timeout=60
    )
    # torch 2.8: gloo prints lines of its own
    assert ended.stdout.endswith("arrived\n") and ended.returncode == 0, ended.stderr
