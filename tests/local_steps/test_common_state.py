"""What is beside the trained weights in `diloco` and `local_sgd` is rank 0's; a joint save says
where ranks differ.
"""

import contextlib
import copy
import io
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.local_steps.common_state import packed_values, set_packed
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.local_steps.partner import Due, FixedPartner
from commhooks.local_steps.schedule import Exchanged
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.training import Run, batch, flat, plain


def _own_batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


class _Observed(nn.Module):
    """Buffers that begin as infinities, that change their shape, and that are registered late, on
    rank 0 only; and a frozen teacher that follows the trained weights.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)
        self.teacher = nn.Parameter(torch.zeros(6, 6), requires_grad=False)
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("seen", torch.tensor(torch.nan))
        self.register_buffer("channels", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.teacher.data.lerp_(self.first.weight.data, 0.1)
            self.low = torch.minimum(self.low, y.min())
            self.seen.fill_(float(y.mean()))
            self.channels = y.abs().amax(0)
            if dist.get_rank() == 0:
                self.first.register_buffer("mask", y.mean(0) > 0)
        return self.second(y)

    def others(self) -> dict[str, torch.Tensor]:
        """All that is no trained weight."""
        return {
            name: each.clone() for name, each in (*self.named_buffers(), ("teacher", self.teacher))
        }


def _observe(steps: int) -> Any:
    """The state before the optimizer's step with which the round ends, after it, and of a save in
    mid-round.
    """
    model = DistributedDataParallel(_Observed())
    hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=steps), check_every=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(steps + 1):
        optimizer.zero_grad()
        model(_own_batch(step)).square().mean().backward()
        found.append(model.module.others())
        optimizer.step()
        found.append(model.module.others())
    exact = hook.state_dict()["exact"]
    return *found[-4:], model.module.others(), exact


def test_buffers_and_frozen_parameters_are_rank_0s(run_ranks):
    first, second = run_ranks(_observe, 3)
    for mine, others_before, others in (
        (first[0], second[0], second[1]),
        (first[3], second[3], second[4]),
    ):
        assert mine.keys() == others.keys() and "first.mask" in mine
        assert all(
            torch.equal(mine[name], others[name]) and mine[name].isfinite().all() for name in mine
        )
        assert not torch.equal(mine["seen"], others_before["seen"])
    # it follows weights that are a rank's own
    assert not torch.equal(first[0]["teacher"], second[0]["teacher"])
    assert first[-1] and second[-1]


class _EightBits(torch.optim.Optimizer):
    """SGD with a momentum of integers and their scale."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = (
                0.9 * state["codes"] * state["scale"] + parameter.grad if state else parameter.grad
            )
            state["scale"] = momentum.abs().max()[None] / 127
            state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
            parameter.sub_(0.01 * momentum)


def _several_optimizers(steps: int) -> tuple[Any, Any]:
    """The state of the optimizers of this rank before a synchronisation and after it: several that
    step the same parameters, one of which rank 1 steps more often, one with moments of other
    shapes, one with codes.
    """
    run = Run.new(hook="local_sgd")
    parameters = list(run.ddp.parameters())
    optimizers = [
        torch.optim.SGD(parameters, lr=0.01 * (each + 1), momentum=0.1 * each + 0.2)
        for each in range(2)
    ]
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
        del optimizers[1].state[parameters[0]]
    before = [plain(each.state_dict()) for each in optimizers]
    run.hook.synchronize(optimizers=True)
    return before, [plain(each.state_dict()) for each in optimizers]


def test_the_state_of_all_optimizers_is_rank_0s(run_ranks):
    (mine, mine_now), (other, other_now) = run_ranks(_several_optimizers, 3)
    assert mine_now == other_now == mine
    assert all(one != another for one, another in zip(mine, other, strict=True))


# ---- what a joint save says
# ------------------------------------------------------------------------------------------


def _save_after(what: str) -> Any:
    """A joint save in which the ranks may differ."""
    steps, synchronized = (3, what == "synchronized")
    run = Run.new(hook=commhooks.LocalSGD(sync_every=3), loss_scale=lambda: 1.0).train(steps)
    if what == "a skipped step":  # of an optimizer that rank 1 has not stepped since the load
        run = Run.new(hook=commhooks.LocalSGD(sync_every=3), loss_scale=lambda: 1.0).load(
            run.save()
        )
        images, labels = batch(5, dist.get_rank())
        nn.functional.cross_entropy(run.ddp(images), labels).backward()
        if dist.get_rank() == 0:
            run.optimizer.step()
    # stands for a schedule-free optimizer in evaluation mode, whose state determines the weights
    else:
        if synchronized:
            run.hook.synchronize(optimizers=True)
        with torch.no_grad():
            for p in run.ddp.parameters():
                p.add_(run.optimizer.state[p]["momentum_buffer"])
    with log_lines("commhooks") as lines:
        exact = run.hook.state_dict()["exact"]
    return exact, run.weights(), [line for line in lines if "marked inexact" in line]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("after a round", "differ in the weights (0.weight and 7 more)"),
        ("synchronized", ""),
        ("a skipped step", "differ in the state of SGD with 8 parameters"),
    ],
)
def test_a_joint_save_says_what_differs(run_ranks, what, says):
    (exact, weights, lines), (same, others, none) = run_ranks(_save_after, what)
    assert exact == same == (not says) and none == [] and len(lines) == bool(says)
    assert all(says in line for line in lines)
    assert torch.equal(weights, others) == (what != "after a round")


@torch.no_grad()
def _swap(run: Run, how: str) -> None:
    """Put other weights into the model, as averages of weights and schedule-free optimizers do for
    an evaluation.
    """
    for parameter in run.ddp.parameters():
        other = parameter * 0.5
        if how == "in place":
            parameter.copy_(other)
        elif how == "through data, on one rank":
            parameter.data.mul_(1.0 if dist.get_rank() == 0 else 0.5)
        elif how == "as new data":
            parameter.data = other
        elif (
            how == "there and back"
        ):  # as schedule-free optimizers do around a validation: only rounding is left
            parameter.lerp_(other, 0.9).lerp_(other, 1 - 1 / 0.1)


def _saved_in_mid_round(how: str) -> Any:
    """Two joint saves in mid-round, with a step between them, after which the weights are trained
    ones again.
    """
    run = Run.new(hook=commhooks.LocalSGD(sync_every=4))
    if how == "LBFGS":
        run.optimizer = torch.optim.LBFGS(run.ddp.parameters(), lr=0.1, max_iter=2)
        images, labels = batch(0, dist.get_rank())

        def closure() -> torch.Tensor:
            run.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run.ddp(images), labels)
            loss.backward()
            return loss

        run.optimizer.step(closure)  # type: ignore[arg-type]
    else:
        run.train(2)
        _swap(run, how)
    with log_lines("commhooks") as lines:
        first = [run.hook.state_dict()["exact"], run.hook.state_dict()["exact"]]
        second = (
            run.hook.state_dict()["exact"]
            if how == "LBFGS"
            else run.train(1).hook.state_dict()["exact"]
        )
    return (
        first,
        second,
        [line for line in lines if "something other than a step of an optimizer" in line],
    )


@pytest.mark.parametrize(
    ("how", "is_exact"),
    [
        ("trained", True),
        ("LBFGS", True),
        ("there and back", True),
        ("in place", False),
        ("through data, on one rank", False),
        ("as new data", False),
    ],
)
def test_a_round_that_ends_with_other_weights_than_the_trained_ones_makes_its_save_inexact(
    run_ranks, how, is_exact
):
    found = run_ranks(_saved_in_mid_round, how)
    for first, second, _ in found:
        assert first == [is_exact, is_exact] and second
    assert [len(lines) for *_, lines in found] == [0 if is_exact else 2, 0]


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
        scaler.scale(
            nn.functional.cross_entropy(run.ddp(images), labels) * (torch.inf if bad else 1.0)
        ).backward()
        scaler.step(run.optimizer)
        scaler.update()
    before = scaler.state_dict()
    exact = run.hook.state_dict()["exact"]
    return before, scaler.state_dict(), plain(run.optimizer.state_dict()), exact


def test_the_scale_is_rank_0s(run_ranks):
    (mine, mine_now, state, exact), (other, other_now, others, _) = run_ranks(_scaled, True)
    assert mine == mine_now == other_now != other and state == others and exact


# ---- after a load
# --------------------------------------------------------------------------------------------------


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
    return (
        anchor,
        loaded,
        run.weights(),
        [line for line in lines if "differ from the common weights" in line],
    )


@pytest.mark.parametrize(
    ("apart", "says"), [(False, "the weights of the model"), (True, "the common weights")]
)
def test_a_load_says_which_weights_are_taken(run_ranks, apart, says):
    found = run_ranks(_other_weights, apart)
    for anchor, loaded, now, _ in found:
        assert torch.equal(now, anchor if apart else loaded)
    assert [len(lines) for *_, lines in found] == [1, 0] and says in found[0][3][0]


# ---- the driver
# --------------------------------------------------------------------------------------------------


class _OnTheCPU(nn.SyncBatchNorm):
    """DDP takes it on GPUs only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def _repeats(what: str) -> str:
    kwargs: dict[str, Any] = {
        "find_unused_parameters": {"ddp": {"find_unused_parameters": True}}
    }.get(what, {})
    kwargs |= {"ranks_per_node": 2} if what == "ranks_per_node" else {}
    start = 10 if what == "start_iter" else 0
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 10)
    )
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


@pytest.mark.parametrize(
    "what", ["find_unused_parameters", "ranks_per_node", "start_iter", "SyncBatchNorm"]
)
def test_a_repeated_pass_that_would_communicate_is_refused(run_ranks, what):
    for said in run_ranks(_repeats, what, world_size=4 if what == "ranks_per_node" else 2):
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
        found.append(
            (flat(each.parameters()), hook.stats()["step"], hook.stats()["backward_passes"])
        )
        hook.close()
    return found


def test_a_module_that_nothing_wraps(run_ranks):
    for (weights, *counts), (same, *same_counts) in run_ranks(_plain, 8, 2):
        assert counts == same_counts == [2, 8]
        torch.testing.assert_close(weights, same)


@pytest.mark.parametrize(
    "how", ["each step has two passes", "no_sync", "optimizers take turns", "never stepped"]
)
def test_a_machine_meets_the_others_when_all_its_optimizers_have_stepped(how):
    """Then they have state, which a machine that comes gets from another one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first, second = (torch.optim.Adam(layer.parameters(), lr=0.01) for layer in model)
    met: list[tuple[int, bool, list[int]]] = []

    def exchange(partner: FixedPartner, outer: OuterSteps, due: Due) -> Exchanged:
        joined = hook._hook.driver.state.joined
        met.append((passes, joined, [len(optimizer.state) for optimizer in (first, second)]))
        outer.exchange(due.fragment)
        return Exchanged()

    new = {"joined": False, "exchange": exchange}
    with (
        process_group_of_one(),
        mock.patch.multiple(FixedPartner, **new),
        log_lines("commhooks") as lines,
    ):
        hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=4))
        for passes in range(1, 7):
            accumulates = how != "optimizers take turns" and passes % 2 == 1
            with hook.no_sync() if how == "no_sync" and accumulates else contextlib.nullcontext():
                model(torch.randn(3, 4)).square().mean().backward()
            if how == "never stepped" or accumulates:
                continue
            for optimizer in (
                (first, second)
                if how != "optimizers take turns"
                else ((first, second)[passes % 2],)
            ):
                optimizer.step()
                optimizer.zero_grad()
        counted = hook.stats()["backward_passes"]
    late = [line for line in lines if "no torch.optim optimizer has stepped" in line]
    assert counted == (3 if how == "no_sync" else 6)
    if how == "never stepped":
        assert met == [(6, False, [0, 0])] and len(late) == 1
    else:
        assert met[0] == (2, False, [2, 2]) and not late


def _of_a_machine(number: int, grouped: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model with buffers whose elements share memory, its optimizer and its common state."""
    model = nn.Linear(4, 1)
    model.register_buffer("seen", torch.full((4,), float(number)).expand(3, 4))
    model.register_buffer("mask", torch.ones(4).expand(3, 4))
    hook = commhooks.attach(model, commhooks.DiLoCo())
    parameters = list(model.parameters())
    groups = [parameters] if grouped else [[parameter] for parameter in parameters]
    optimizer = torch.optim.Adam([{"params": group} for group in groups], lr=0.1 * number)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, hook._hook.driver.common


@pytest.mark.parametrize("grouped", [True, False], ids=["the same groups", "other groups"])
def test_a_machine_takes_all_state_of_another_one_that_fits(grouped):
    with process_group_of_one():
        first, optimizer, common = _of_a_machine(1, True)
        second, own, taker = _of_a_machine(2, grouped)
        mask = second.mask
        form, tensors = common.described({})
        differing = taker.take(form, dict(enumerate(tensors)), {})
        rates = {label: value for label, (value, _) in common.rates().items()}
        set_packed(packed_values(rates), taker.rates())  # after each outer step
    assert torch.equal(second.seen, first.seen) and second.mask is mask
    assert {group["lr"] for group in own.param_groups} == {0.1 if grouped else 0.2}
    moments = [state["exp_avg"] for state in own.state.values()]
    others = [state["exp_avg"] for state in optimizer.state.values()]
    assert grouped == all(map(torch.equal, moments, others))
    assert differing == [] if grouped else ["the state of Adam with 2 parameters"]


def test_a_module_takes_one_hook_at_a_time():
    """Each would exchange its weights, and multiply learning rates."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with process_group_of_one():
        hook = commhooks.attach(model, commhooks.DiLoCo())
        for part in (model, model[1]):
            with pytest.raises(commhooks.AttachError, match="has the hook 'diloco' already"):
                commhooks.attach(part, commhooks.LocalSGD())
        hook.detach()
        commhooks.attach(model[1], commhooks.LocalSGD()).close()
        commhooks.attach(model, commhooks.LocalSGD())


def test_no_sync_is_for_modules_that_nothing_wraps():
    with process_group_of_one():
        hook = commhooks.attach(DistributedDataParallel(nn.Linear(2, 1)), commhooks.DiLoCo())
        with pytest.raises(
            commhooks.HookConfigError,
            match="no_sync\\(\\) of a hook is for a module that nothing wraps",
        ):
            hook.no_sync()


def _copied_before_a_save(folder: str) -> list[tuple[bool, list[str]]]:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=4)).train(2)
    found = []
    for synchronized in (False, True):
        run.train(1)
        if synchronized:
            run.hook.synchronize(optimizers=True)
        copies, _ = get_state_dict(
            run.ddp, run.optimizer, options=StateDictOptions(cpu_offload=True)
        )
        with log_lines("commhooks") as lines, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about copies on the CPU
            state = {"model": copies, "hook": run.hook.state_dict("distributed")}
            dcp.save(state, checkpoint_id=f"{folder}/{synchronized}")
        exact = torch.load(io.BytesIO(state["hook"]["commhooks"]))["exact"]
        found.append((exact, [line for line in lines if "this save has ended a round" in line]))
    return found


def test_copies_that_are_older_than_the_round_that_a_save_ends(run_ranks, tmp_path):
    (late, in_order), others = run_ranks(_copied_before_a_save, str(tmp_path))
    assert late[0] is False and len(late[1]) == 1 and "cpu_offload=True" in late[1][0]
    assert in_order == (True, []) and others == [(False, []), (True, [])]
