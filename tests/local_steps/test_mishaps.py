"""What may go wrong in a round of `diloco` and `local_sgd`: numbers that are not finite, ranks that would miss each
other, a process that ends while a part is on its way."""

import gc
import subprocess
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import commhooks
from commhooks.local_steps.fragments import OuterSteps
from tests.support import warm
from tests.support.ddp_steps import log_lines
from tests.support.training import Run, batch


def _with_a_bad_rank(every: int) -> Any:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every))
    run.train(every)
    good = run.weights()
    run.train(1)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(run.ddp.parameters())[0] = torch.nan
    run.train(every - 1)
    return good, run.weights(), run.hook.stats()


def test_a_round_with_a_rank_that_is_not_finite_is_discarded(run_ranks):
    for good, after, stats in run_ranks(_with_a_bad_rank, 3):
        assert torch.equal(good, after)
        assert (stats["nonfinite_steps"], stats["step"]) == (1, 1)


def _after_a_bad_gradient(config: commhooks.HookConfig, optimizer: type[torch.optim.Optimizer], steps: int) -> Any:
    """The second pass of rank 1 has a gradient that is not finite, which its optimizer takes in."""
    run = Run.new(hook=config)
    run.optimizer = optimizer(run.ddp.parameters(), lr=0.01)  # type: ignore[call-arg]
    with log_lines("commhooks") as lines:
        for step in range(steps):
            images, labels = batch(step, dist.get_rank())
            run.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run.ddp(images), labels)
            (loss * (torch.nan if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
            run.optimizer.step()
        run.hook.synchronize(optimizers=True)
    anew = [line for line in lines if "begin anew" in line]
    return run.weights(), run.hook.stats(), anew, run.optimizer.state_dict()["state"][0]


@pytest.mark.parametrize(
    "config",
    [commhooks.DiLoCo(sync_every=3), commhooks.DiLoCo(sync_every=4, fragments=2, delay=1)],
    ids=["at once", "streaming"],
)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_later_rounds_are_finite_again(run_ranks, config, optimizer):
    first, second = run_ranks(_after_a_bad_gradient, config, optimizer, 9)
    assert torch.equal(first[0], second[0]) and first[0].isfinite().all()
    assert first[1]["nonfinite_steps"] == 1 and first[1]["step"] >= 2
    assert len(first[2]) == 0 and len(second[2]) == 1 and "on rank 1 the optimizers kept numbers" in second[2][0]
    assert all(each.isfinite().all() for each in second[3].values())


def _many_bad_rounds(rounds: int) -> list[str]:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=1))
    with log_lines("commhooks") as lines:
        for _ in range(rounds):
            run.train(1)
            with torch.no_grad():
                run.ddp.module[0].weight.fill_(torch.nan)
    return [line for line in lines if "is discarded" in line]


def test_many_discarded_rounds_are_said_again(run_ranks):
    said, _ = run_ranks(_many_bad_rounds, 12)
    assert [line.partition("number ")[2].partition(" ")[0] for line in said] == ["1", "10"]


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
    for said in run_ranks(_refused, how, timeout_s=20):
        assert text in said


def _in_inference_mode() -> tuple[torch.Tensor, torch.Tensor]:
    """As frameworks call it before a validation, in the first round and later."""
    run = Run.new(hook=commhooks.DiLoCo(sync_every=3, outer_momentum=0.5))
    same = Run.new(hook=commhooks.DiLoCo(sync_every=3, outer_momentum=0.5))
    for _ in range(2):
        same.train(2).hook.synchronize(optimizers=True)
        run.train(2)
        with torch.inference_mode():
            run.hook.synchronize(optimizers=True)
    return run.train(4).weights(), same.train(4).weights()


def test_a_round_may_end_in_inference_mode(run_ranks):
    for run, same in run_ranks(_in_inference_mode):
        assert torch.equal(run, same)


def _collects_another() -> int:
    """A model of before is found to be garbage in the middle of an outer step, which is in that of an optimizer."""
    gone: list[Any] = [Run.new(hook="local_sgd").train(1)]
    gone.append(gone)
    runner = weakref.ref(gone[0].hook._hook)
    run, advance = Run.new(hook=commhooks.LocalSGD(sync_every=1)), OuterSteps.advance
    third = Run.new(hook="local_sgd")  # told of the step after `run`
    del gone

    def collecting(*args: Any) -> Any:
        gc.collect()
        return advance(*args)

    gc.disable()
    try:
        alive = runner() is not None
        with mock.patch.object(OuterSteps, "advance", collecting):
            run.train(2)
    finally:
        gc.enable()
    assert alive and runner() is None
    return run.hook.stats()["step"] + third.hook.stats()["step"]


def test_another_hook_may_end_within_an_outer_step(run_ranks):
    assert run_ranks(_collects_another) == [2, 2]


ENDS_EARLY = """
import time, torch, torch.distributed as dist, commhooks
from commhooks.local_steps import fragments

def slow(exchange):
    time.sleep(0.3)
    print("arrived", flush=True)

fragments._Exchange._exchange = slow
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=2, delay=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2)).backward()
optimizer.step()
"""


def test_a_process_that_ends_waits_for_what_is_on_its_way():
    """A thread that is stopped within a collective of gloo aborts the process."""
    ended = subprocess.run([warm.python(), "-c", ENDS_EARLY], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "arrived\n" and ended.returncode == 0, ended.stderr
