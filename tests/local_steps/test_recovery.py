"""`diloco` and `local_sgd` where a rank is lost, or the ranks have come apart: they find together again, and say so."""

import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.comm import collectives
from commhooks.gradients import precision
from tests.support.ddp_steps import log_lines
from tests.support.training import Run, flat


def _lost_rank() -> tuple[torch.Tensor, dict[str, Any]]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=3), loss_scale=lambda: 1.0)
    run.train(4)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(run.ddp.parameters())[0] = torch.nan
    run.train(6)
    return run.weights(), run.hook.stats()


def test_a_rank_whose_weights_are_not_finite_ends_the_round_though_its_gradients_never_are(run_ranks):
    """With a scaler a round waits for a pass after which all ranks step."""
    for weights, stats in run_ranks(_lost_rank):
        assert weights.isfinite().all()
        assert stats["nonfinite_steps"] == 1 and stats["step"] >= 2


def _overflowing_batch() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=3))
    for step in range(6):
        images = torch.randn(8, 4)
        if step == 4 and dist.get_rank() == 1:
            images[0, 0] = torch.inf
        model.zero_grad()
        model(images).square().mean().backward()
    norm = model.module[1]
    own = norm.running_var.clone()
    hook.synchronize()
    return [own, norm.running_mean, norm.running_var]


def test_statistics_that_overflow_on_one_rank_stay_those_of_the_others(run_ranks):
    one, other = run_ranks(_overflowing_batch)
    assert one[0].isfinite().all() and not other[0].isfinite().all()
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        assert mine.isfinite().all() and torch.equal(mine, theirs)
    assert not torch.equal(one[2], torch.ones(4))


def _attached_again() -> tuple[float, float, list[str]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.register_buffer("graph", torch.eye(4).to_sparse())
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def attach() -> commhooks.CommHook:
        return commhooks.attach(model, commhooks.LocalSGD(sync_every=3), replicate_group=mesh["replicate"])

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


def _saves_in_a_thread() -> tuple[bool, list[str], torch.Tensor]:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=3)).train(4)
    saved: list[dict[str, Any]] = []
    with log_lines("commhooks") as lines:
        thread = threading.Thread(target=lambda: saved.append(run.hook.state_dict()))
        thread.start()
        run.train(4)
        thread.join()
    run.hook.synchronize()
    return saved[0]["exact"], [line for line in lines if "in another thread" in line], run.weights()


def test_a_save_in_another_thread_does_not_disturb_the_training(run_ranks):
    found = run_ranks(_saves_in_a_thread)
    for exact, lines, weights in found:
        assert not exact and len(lines) == 1 and torch.equal(weights, found[0][2])


def _loads_while_a_part_is_on_its_way() -> tuple[int, int, int]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=4, delay=3))
    run.train(4)
    saved = run.save()
    if dist.get_rank() == 1:
        time.sleep(1.0)
    run.train(1)
    with mock.patch("commhooks.local_steps.fragments.ABANDONED_LIMIT_S", 0.1):
        run.load(saved)
    at_load = run.hook.stats()["step"]
    time.sleep(1.0 if dist.get_rank() == 0 else 0.0)
    later = run.hook.stats()["step"]
    run.train(8)
    run.hook.synchronize()
    return at_load, later, run.hook.stats()["step"]


def test_what_is_on_its_way_does_not_count_as_a_step_of_the_loaded_state(run_ranks):
    (at_load, later, end), other = run_ranks(_loads_while_a_part_is_on_its_way)
    assert at_load == later and end > later and other == (at_load, later, end)


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
