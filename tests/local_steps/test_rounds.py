"""When the rounds of `diloco` and `local_sgd` end, and what ends with them: buffers, modes of
training, optimizers.
"""

import copy
import gc
import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.hook.replica_check import ReplicaCheck
from tests.support.ddp_steps import log_lines
from tests.support.training import SEVERAL_BUCKETS_MB, Run, batch, flat


def _by_hand() -> list[Any]:
    """Four steps in rounds of three, of an optimizer that torch does not know. After the third,
    rank 0 alone evaluates in the other mode. (The model is trained in evaluation mode.)
    """
    run = Run.new(hook="local_sgd", hook_options={"sync_every": 3})
    run.ddp.eval()
    with log_lines() as lines:
        before, averaged = _four_steps(run, training=False)
    return [
        before,
        averaged,
        [line for line in lines if "no torch.optim optimizer has stepped" in line],
    ]


def _four_steps(run: Run, training: bool) -> list[torch.Tensor]:
    for step in range(4):
        if step == 3 and dist.get_rank() == 0:
            run.ddp.module.train(not training)
            run.ddp.module(batch(step, 0)[0])
            run.ddp.module.train(training)
        before, (images, labels) = run.weights(), batch(step, dist.get_rank())
        loss = nn.functional.cross_entropy(run.ddp(images), labels)
        averaged = run.weights()
        loss.backward()
        with torch.no_grad():
            for parameter in run.ddp.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    return [before, averaged]


def test_optimizers_that_torch_does_not_know_get_their_outer_step_before_the_next_forward_pass(
    run_ranks,
):
    (mine, averaged, warnings), (others, same, _) = run_ranks(_by_hand)
    assert len(warnings) == 1 and "since backward pass 3" in warnings[0]
    assert not torch.equal(mine, others) and torch.equal(averaged, same)
    torch.testing.assert_close(averaged, (mine + others) / 2)


def _sparse(overflows_at: int) -> Any:
    """Three steps in rounds of two, of a model with a sparse gradient and a scaler."""
    torch.manual_seed(0)
    words = nn.Embedding(10, 4, sparse=True)
    model = DistributedDataParallel(nn.Sequential(words, nn.Flatten(), nn.Linear(12, 1)))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hook = commhooks.attach(
        model, "local_sgd", hook_options={"sync_every": 2}, loss_scale=scaler.get_scale
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randint(
            0, 10, (5, 3), generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
        )
        bad = step == overflows_at and dist.get_rank() == 1
        scaler.scale(model(x).sum() * (torch.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append(hook.stats()["step"])
    return steps, flat(model.parameters())


@pytest.mark.parametrize(("overflows_at", "expected"), [(-1, [0, 1, 1]), (1, [0, 0, 1])])
def test_sparse_gradients_with_a_scaler(run_ranks, overflows_at, expected):
    (first, weights), (second, others) = run_ranks(_sparse, overflows_at)
    assert first == second == expected
    assert torch.equal(weights, others) == (overflows_at == 1)  # a round has just ended


class _Odd(nn.Module):
    """A BatchNorm, a tied weight, a frozen one, a scalar, several dtypes, an unused buffer with
    infinities.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.wide = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([0.1, -torch.inf, 0.7]))
        self.register_buffer("triangle", torch.ones(300, 300, dtype=torch.bool).tril())
        self.register_buffer("large", torch.ones(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.norm(self.first(x))))
        return (
            self.scale * (y + self.narrow(x.bfloat16()).float()) * self.wide.float() + self.frozen
        )


def _train_odd(every: int) -> Any:
    model = DistributedDataParallel(_Odd())
    frozen, mask = model.module.frozen.clone(), model.module.mask.clone()
    hook = commhooks.attach(model, "diloco", hook_options={"sync_every": every})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    means = []
    for step in range(2 * every):
        x = (
            torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            + dist.get_rank()
        )
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 2 * every - 1:
            means = [model.module.norm.running_mean.clone()]
        optimizer.step()
    assert hook.stats()["step"] == 2
    assert hook.stats()["bytes_sent"] < 2000  # nothing of what has not changed
    assert torch.equal(frozen, model.module.frozen) and torch.equal(mask, model.module.mask)
    assert model.module.second.weight is model.module.first.weight
    return dict(model.module.state_dict()), means[0]


def test_batchnorm_tied_and_frozen(run_ranks):
    (first, mine), (second, other) = run_ranks(_train_odd, 3)
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert not torch.equal(mine, other)
    assert torch.equal(first["norm.running_mean"], mine)


def _in_mode(mode: str) -> Any:
    """Six steps in rounds of three; the weights after each round."""
    options = {
        "static_graph": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }.get(mode, {})
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        if mode == "scaler"
        else None
    )
    scale = None if scaler is None else scaler.get_scale
    # torch 2.13 compiles no DDP with small buckets
    several = 25 if mode == "compile" else SEVERAL_BUCKETS_MB
    run = Run.new(
        hook="local_sgd",
        hook_options={"sync_every": 3},
        ddp=options,
        loss_scale=scale,
        bucket_cap_mb=several,
    )
    model = torch.compile(run.ddp, backend="eager") if mode == "compile" else run.ddp
    parameters = list(run.ddp.parameters())
    optimizers: list[Any] = [run.optimizer]
    if mode == "two optimizers":
        optimizers = [
            torch.optim.SGD(parameters[:3], lr=0.05),
            torch.optim.Adam(parameters[3:], lr=0.01),
        ]
    after = []
    for step in range(6):
        images, labels = batch(step, dist.get_rank())
        for each in optimizers:
            each.zero_grad()
        if mode == "accumulate":
            with run.ddp.no_sync():
                nn.functional.cross_entropy(model(images[:4]), labels[:4]).backward()
        loss = nn.functional.cross_entropy(model(images), labels)
        if scaler is not None and step == 2:
            loss = loss * (torch.inf if dist.get_rank() == 1 else 1.0)
        (loss if scaler is None else scaler.scale(loss)).backward()
        for each in optimizers:
            each.step() if scaler is None else scaler.step(each)
        if scaler is not None:
            scaler.update(2.0**10)
        after.append(run.weights())
    return after, run.hook.stats()


@pytest.mark.parametrize(
    "mode", ["static_graph", "unused", "accumulate", "two optimizers", "compile", "scaler"]
)
def test_rounds_end_together_in_every_mode(run_ranks, mode):
    (first, stats), (second, _) = run_ranks(_in_mode, mode)
    equal = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
    # With a scaler, rank 1 skips the third step, and the round takes one step more.
    assert equal == [step in ((3,) if mode == "scaler" else (2, 5)) for step in range(6)]
    assert stats["backward_passes"] == 6 and stats["nonfinite_steps"] == 0


def _said(unused: bool, hook: Any = "local_sgd", **attach: Any) -> list[str]:
    with log_lines("commhooks") as lines:
        model = DistributedDataParallel(_Odd(), find_unused_parameters=unused)
        hook = commhooks.attach(model, hook, **attach)
        model(torch.ones(4, 6)).sum().backward()
        del hook
    return lines


def test_what_ddp_still_sends_and_what_no_more(run_ranks):
    ((broadcast,), _), ((unused, *_), _) = (run_ranks(_said, each) for each in (False, True))
    assert (
        "per step and rank on average, and 0.436 kB per save with an optimizer such as Adam; DDP no"
        in broadcast
    )
    assert "with find_unused_parameters=True DDP sends a message in every step" in unused


def _checked(sync_every: int, passes: int) -> int:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=sync_every), check_every=2)
    checks = 0

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal checks
        checks += 1

    with mock.patch.object(ReplicaCheck, "_compare", counted):
        run.train(passes)
    return checks


def test_replicas_are_compared_after_every_second_round(run_ranks):
    assert run_ranks(_checked, 3, 13) == [3, 3]  # before passes 1, 7 and 13
    streaming = commhooks.DiLoCo(sync_every=4, fragments=2)
    (said, *_), _ = run_ranks(_said, False, streaming, check_every=2)
    assert "check_every compares weights when they should be equal on all ranks" in said


def test_what_one_rank_says(run_ranks):
    ((said,),) = run_ranks(_said, False, world_size=1)
    assert "there is one rank, so nothing is sent. Outer steps are still done, so the run" in said


def _with_closure() -> Any:
    """LBFGS calls its closure on each rank as often as its line search asks for, here three times
    and four. As in Accelerate, the ranks agree before an outer step whether all will step.
    """
    run = Run.new(hook=commhooks.LocalSGD(sync_every=2), loss_scale=lambda: 1.0)
    run.hook.joint_save_limit_s = 5
    optimizer = torch.optim.LBFGS(run.ddp.parameters(), lr=0.1, max_iter=3 + dist.get_rank())
    after = []
    for step in range(5):
        images, labels = batch(step, dist.get_rank())

        def closure(images: torch.Tensor = images, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run.ddp(images), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
        after.append((run.weights(), run.hook.stats()["step_in_round"]))
    passes = run.hook.stats()["backward_passes"]
    return after, passes, run.hook.synchronize(), run.weights()


def test_passes_of_a_closure_count_once(run_ranks):
    (first, passes, *_), (second, other_passes, *_) = found = run_ranks(_with_closure)
    assert (passes, other_passes) == (15, 20)
    assert [
        torch.equal(one, other) for (one, _), (other, _) in zip(first, second, strict=True)
    ] == [step in (1, 3) for step in range(5)]
    assert [in_round for _, in_round in first] == [1, 0, 1, 0, 1]
    assert all(together for *_, together, _ in found) and torch.equal(found[0][-1], found[1][-1])


def _copied_and_pickled() -> Any:
    run = Run.new(hook="local_sgd", hook_options={"sync_every": 2}).train(1)
    copied = copy.deepcopy(run.ddp.module)
    file = io.BytesIO()
    torch.save(run.ddp.module, file)
    file.seek(0)
    run.train(1)
    copied(batch(0, 0)[0]).sum().backward()
    torch.load(file, weights_only=False)(batch(0, 0)[0]).sum().backward()
    hook, runner = run.hook, weakref.ref(run.hook._hook)
    run.ddp, run.optimizer, run.hook = None, None, None  # type: ignore[assignment]
    gc.collect()
    stats = hook.stats()
    del hook, run
    gc.collect()
    return stats["step"], runner() is None


def test_the_model_can_be_copied_and_the_hook_goes_with_it(run_ranks):
    assert run_ranks(_copied_and_pickled) == [(1, True), (1, True)]
