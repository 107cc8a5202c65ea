"""What is beside the trained weights in `diloco` and `local_sgd` is rank 0's; a joint save says where ranks differ."""

import copy
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import log_lines
from tests.support.training import Run, batch, flat, plain


def _own_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


class _Observed(nn.Module):
    """Buffers that begin as infinities, that change their shape, and that are registered late, on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))
        self.register_buffer("seen", torch.tensor(torch.nan))
        self.register_buffer("channels", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.low = torch.minimum(self.low, y.min())
            self.high.copy_(torch.maximum(self.high, y.max()))
            self.seen.fill_(float(y.mean()))
            self.channels = y.abs().amax(0)
            if dist.get_rank() == 0:
                self.first.register_buffer("mask", y.mean(0) > 0)
        return self.second(y)


def _observe(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The buffers before the optimizer's step with which the round ends, and after it."""
    model = DistributedDataParallel(_Observed())
    hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=steps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = {}
    for step in range(steps):
        optimizer.zero_grad()
        model(_own_batch(step)).square().mean().backward()
        before = {name: each.clone() for name, each in model.module.named_buffers()}
        optimizer.step()
    assert hook.stats()["step"] == 1
    return before, dict(model.module.named_buffers())


def test_buffers_are_rank_0s_whatever_they_begin_as(run_ranks):
    (mine, mine_now), (other, other_now) = run_ranks(_observe, 3)
    assert mine.keys() == mine_now.keys() == other_now.keys() and "first.mask" in mine
    for name in mine:
        assert torch.equal(mine[name], mine_now[name]) and torch.equal(mine[name], other_now[name]), name
    assert all(mine[name].isfinite().all() for name in mine) and not torch.equal(mine["seen"], other["seen"])


class _Taught(nn.Module):
    """A student, and its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.student = nn.Linear(6, 6)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) - self.teacher(x.roll(1)) + x

    def teach(self) -> None:
        for mine, students in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data.mul_(0.9).add_(students.data, alpha=0.1)


def _teach(steps: int) -> Any:
    model = DistributedDataParallel(_Taught())
    hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=3), check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(_own_batch(step)).square().mean().backward()
        optimizer.step()
        if step < steps - 1:
            model.module.teach()
    own = flat(model.module.teacher.parameters())
    saved = hook.state_dict()
    return own, flat(model.module.teacher.parameters()), saved["exact"]


def test_a_teacher_is_rank_0s(run_ranks):
    """In mid-round, and with a comparison of the replicas in each round."""
    (mine, mine_now, exact), (other, other_now, _) = run_ranks(_teach, 8)
    assert exact and torch.equal(mine, mine_now) and torch.equal(mine, other_now) and not torch.equal(mine, other)


class _EightBits(torch.optim.Optimizer):
    """SGD with a momentum of integers and their scale."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = 0.9 * state["codes"] * state["scale"] + parameter.grad if state else parameter.grad
            state["scale"] = momentum.abs().max()[None] / 127
            state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
            parameter.sub_(0.01 * momentum)


def _several_optimizers(steps: int) -> tuple[Any, Any]:
    """The state of the optimizers of this rank before a synchronisation and after it: several that step the same
    parameters, one of which rank 1 steps more often, one with moments of other shapes, one with codes."""
    run = Run.new(hook="local_sgd")
    parameters = list(run.ddp.parameters())
    optimizers = [torch.optim.SGD(parameters, lr=0.01 * (each + 1), momentum=0.1 * each + 0.2) for each in range(2)]
    optimizers += [torch.optim.Adafactor(parameters), _EightBits(parameters, {})]
    optimizers[0].param_groups[0]["lr"] *= 1 + dist.get_rank()
    for step in range(steps):
        images, labels = batch(step, dist.get_rank())
        for each in optimizers:
            each.zero_grad()
            nn.functional.cross_entropy(run.ddp(images), labels).backward()
            each.step()
    if dist.get_rank() == 1:
        optimizers[2].step()
    before = [plain(each.state_dict()) for each in optimizers]
    run.hook.synchronize(optimizers=True)
    return before, [plain(each.state_dict()) for each in optimizers]


def test_the_state_of_all_optimizers_is_rank_0s(run_ranks):
    (mine, mine_now), (other, other_now) = run_ranks(_several_optimizers, 3)
    assert mine_now == other_now == mine
    assert all(one != another for one, another in zip(mine, other, strict=True))


# ---- what a joint save says ------------------------------------------------------------------------------------------


def _in_evaluation_mode(steps: int, synchronized: bool) -> Any:
    """Stands for a schedule-free optimizer: in evaluation mode the model has weights that its state determines."""
    run = Run.new(hook=commhooks.LocalSGD(sync_every=3)).train(steps)
    if synchronized:
        run.hook.synchronize(optimizers=True)
    with torch.no_grad():
        for p in run.ddp.parameters():
            p.add_(run.optimizer.state[p]["momentum_buffer"])
    with log_lines("commhooks") as lines:
        exact = run.hook.state_dict()["exact"]
    return exact, run.weights(), [line for line in lines if "marked inexact" in line]


@pytest.mark.parametrize(("steps", "synchronized", "equal"), [(3, False, False), (4, False, True), (3, True, True)])
def test_an_optimizer_in_evaluation_mode(run_ranks, steps, synchronized, equal):
    """At the end of a round, in the middle of one, and in the order that the docs recommend."""
    (exact, weights, lines), (same, others, none) = run_ranks(_in_evaluation_mode, steps, synchronized)
    assert exact == same == torch.equal(weights, others) == equal and none == []
    assert equal == (not lines) and all("differ in the weights (0.weight and 7 more)" in line for line in lines)


def _skipped_by_the_scaler() -> Any:
    """Rank 1 has loaded the state of an optimizer whose step it then skips."""
    run = Run.new(hook=commhooks.LocalSGD(sync_every=4), loss_scale=lambda: 1.0).train(2)
    content = run.save()
    run = Run.new(hook=commhooks.LocalSGD(sync_every=4), loss_scale=lambda: 1.0).load(content)
    images, labels = batch(5, dist.get_rank())
    nn.functional.cross_entropy(run.ddp(images), labels).backward()
    if dist.get_rank() == 0:
        run.optimizer.step()
    with log_lines("commhooks") as lines:
        exact = run.hook.state_dict()["exact"]
    return exact, [line for line in lines if "differ in the state of SGD with 8 parameters" in line]


def test_an_optimizer_that_one_rank_has_not_stepped(run_ranks):
    (exact, lines), (same, _) = run_ranks(_skipped_by_the_scaler)
    assert not exact and not same and len(lines) == 1


def _at_different_passes() -> Any:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=30)).train(17 + dist.get_rank())
    run.hook.joint_save_limit_s = 30
    began = time.monotonic()
    with log_lines("commhooks") as lines:
        exact = run.hook.state_dict()["exact"]
    return exact, time.monotonic() - began, lines


def test_ranks_at_different_passes_are_told_at_once(run_ranks):
    (exact, seconds, lines), (same, other_seconds, _) = run_ranks(_at_different_passes)
    assert not exact and not same and max(seconds, other_seconds) < 15
    assert any("the ranks have made 17 and 18 backward passes" in line for line in lines)


def _scaled(skips: bool) -> Any:
    """The scale and the growth count after a joint save; rank 1 has skipped a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    run = Run.new(hook=commhooks.LocalSGD(sync_every=6), loss_scale=scaler.get_scale)
    for step in range(3):
        images, labels = batch(step, dist.get_rank())
        run.optimizer.zero_grad()
        bad = skips and step == 1 and dist.get_rank() == 1
        scaler.scale(nn.functional.cross_entropy(run.ddp(images), labels) * (torch.inf if bad else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
    before = scaler.state_dict()
    exact = run.hook.state_dict()["exact"]
    return before, scaler.state_dict(), plain(run.optimizer.state_dict()), exact


def test_the_scale_is_rank_0s(run_ranks):
    (mine, mine_now, state, exact), (other, other_now, others, _) = run_ranks(_scaled, True)
    assert mine == mine_now == other_now != other and state == others and exact


# ---- after a load ----------------------------------------------------------------------------------------------------


def _other_weights(apart: bool) -> Any:
    saved = Run.new(hook=commhooks.LocalSGD(sync_every=3)).train(3).save()
    run = Run.new(hook=commhooks.LocalSGD(sync_every=3)).load(saved)
    anchor = run.weights()
    with torch.no_grad():
        for p in run.ddp.parameters():
            p.mul_(0.5 + 0.1 * dist.get_rank() * apart)
    loaded = run.weights()
    with log_lines("commhooks") as lines:
        run.ddp(batch(0, 0)[0])
    return anchor, loaded, run.weights(), [line for line in lines if "has other weights than those" in line]


@pytest.mark.parametrize(("apart", "says"), [(False, "the weights of the model"), (True, "the common ones")])
def test_a_load_says_which_weights_are_taken(run_ranks, apart, says):
    found = run_ranks(_other_weights, apart)
    for anchor, loaded, now, _ in found:
        assert torch.equal(now, anchor if apart else loaded)
    assert [len(lines) for *_, lines in found] == [1, 0] and says in found[0][3][0]


# ---- the driver ------------------------------------------------------------------------------------------------------


class _OnTheCPU(nn.SyncBatchNorm):
    """DDP takes it on GPUs only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def _repeats(what: str) -> str:
    kwargs: dict[str, Any] = {"find_unused_parameters": {"ddp": {"find_unused_parameters": True}}}.get(what, {})
    kwargs |= {"ranks_per_node": 2} if what == "ranks_per_node" else {}
    start = 10 if what == "start_iter" else 0
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 10))
    run = Run.new(model, hook=commhooks.LocalSGD(sync_every=2, start_iter=start), **kwargs)
    if what == "SyncBatchNorm":
        run.ddp.module[2] = _OnTheCPU(8, affine=False)
    optimizer = torch.optim.LBFGS(run.ddp.parameters(), lr=0.1, max_iter=3 + dist.get_rank())
    images, labels = batch(0, dist.get_rank())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(run.ddp(images), labels)
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except commhooks.HookRunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["find_unused_parameters", "ranks_per_node", "start_iter", "SyncBatchNorm"])
def test_a_repeated_pass_that_would_communicate_is_refused(run_ranks, what):
    for said in run_ranks(_repeats, what, world_size=4 if what == "ranks_per_node" else 2, timeout_s=30):
        assert f"That cannot be combined with {what}" in said


def _plain(steps: int, start: int) -> Any:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    config = commhooks.DiLoCo(sync_every=3, outer_momentum=0.5, start_iter=start)
    found = []
    for each in (model, wrapped):
        hook = commhooks.attach(each, config)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            each(_own_batch(step)).square().mean().backward()
            optimizer.step()
        found.append((flat(each.parameters()), hook.stats()["step"], hook.stats()["backward_passes"]))
        hook.close()
    return found


@pytest.mark.parametrize("start", [0, 2])
def test_a_module_that_nothing_wraps(run_ranks, start):
    for (weights, *counts), (same, *same_counts) in run_ranks(_plain, 7, start):
        assert counts == same_counts == [(7 - start) // 3, 7]
        torch.testing.assert_close(weights, same)


def _closed() -> Any:
    hook = Run.new(hook=commhooks.LocalSGD(sync_every=2)).train(4).hook
    before = hook.stats()
    hook.close()
    return before, hook.stats()


def test_the_outer_gradient_is_known_after_the_end(run_ranks):
    for before, after in run_ranks(_closed):
        assert after["outer_gradient_norm"] == before["outer_gradient_norm"] > 0
        assert after["outer_gradient_cosine"] == before["outer_gradient_cosine"]


def _copied_before_a_save(folder: str) -> list[list[str]]:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=4)).train(2)
    found = []
    for synchronized in (False, True):
        run.train(1)
        if synchronized:
            run.hook.synchronize(optimizers=True)
        copies, _ = get_state_dict(run.ddp, run.optimizer, options=StateDictOptions(cpu_offload=True))
        with log_lines("commhooks") as lines, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about copies on the CPU
            state = {"model": copies, "hook": run.hook.state_dict("distributed")}
            dcp.save(state, checkpoint_id=f"{folder}/{synchronized}")
        found.append([line for line in lines if "this save has ended a round" in line])
    return found


def test_copies_that_are_older_than_the_round_that_a_save_ends(run_ranks, tmp_path):
    (late, in_order), others = run_ranks(_copied_before_a_save, str(tmp_path))
    assert len(late) == 1 and "cpu_offload=True" in late[0] and in_order == [] and others == [[], []]
