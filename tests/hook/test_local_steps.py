"""Hooks that average weights once in several steps: `diloco` and `local_sgd`."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.compressors.local_steps.reference import ReferenceDiLoCo
from tests.support.training import SEVERAL_BUCKETS_MB, Run, batch, flat, make_model


def _sgd(run: Run) -> Run:
    """With an optimizer that has no memory."""
    run.optimizer = torch.optim.SGD(run.ddp.parameters(), lr=0.05)
    return run


def _one_is_ddp() -> tuple[torch.Tensor, torch.Tensor]:
    hook = commhooks.DiLoCo(sync_every=1, wire="float32")
    return _sgd(Run.new(hook=hook)).train(8).weights(), _sgd(Run.new(hook=None)).train(8).weights()


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_outer_step_after_each_step_is_ddp(run_ranks, world_size):
    for ours, plain in run_ranks(_one_is_ddp, world_size=world_size):
        assert (ours - plain).abs().max() < 1e-6


def _as_torch(every: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = start + 3 * every
    ours = Run.new(hook=commhooks.LocalSGD(sync_every=every, start_iter=start)).train(steps)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averager = PeriodicModelAverager(period=every)
    for step in range(steps):
        images, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        if step < start:
            nn.functional.cross_entropy(model(images), labels).backward()
        else:
            nn.functional.cross_entropy(model.module(images), labels).backward()
        optimizer.step()
        if step >= start:
            averager.step += 1 if averager.step == 0 else 0  # it would average at its step 0
            averager.average_parameters(model.parameters())
    return ours.weights(), flat(model.parameters())


@pytest.mark.parametrize(("world_size", "every", "start"), [(2, 3, 0), (3, 4, 2)])
def test_local_sgd_is_that_of_torch(run_ranks, world_size, every, start):
    for ours, torchs in run_ranks(_as_torch, every, start, world_size=world_size):
        assert (ours - torchs).abs().max() < 1e-6


def _with_reference(every: int, rounds: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every, **options))
    reference = ReferenceDiLoCo(run.weights(), options["outer_lr"], options["outer_momentum"])
    alone = copy.deepcopy(run.ddp.module)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(every * rounds):
        images, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(images), labels).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            everyone = [torch.empty_like(run.weights()) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, flat(alone.parameters()))
            torch.nn.utils.vector_to_parameters(reference.step(everyone).float(), alone.parameters())
    run.train(every * rounds)
    return run.weights(), flat(alone.parameters()), reference.anchor


@pytest.mark.parametrize(("wire", "bound"), [("float32", 1e-6), ("int8", 2e-3), ("int4", 3e-2)])
def test_diloco_is_that_of_the_paper(run_ranks, wire, bound):
    found = run_ranks(_with_reference, 3, 4, outer_lr=0.7, outer_momentum=0.9, wire=wire, world_size=3)
    for ours, plain, _ in found:
        assert torch.equal(ours, found[0][0])
        assert (ours - plain).abs().max() < bound
        assert wire == "float32" or not torch.allclose(ours, plain, atol=1e-6)


def _bytes_of_passes(every: int, passes: int, **options: Any) -> tuple[list[int], dict[str, Any], int]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every, **options))
    sent = []
    for _ in range(passes):
        before = run.hook.stats()["bytes_sent"]
        run.train(1)
        sent.append(run.hook.stats()["bytes_sent"] - before)
    return sent, run.hook.stats(), run.hook.plan().bytes_after


def test_nothing_is_sent_between_two_outer_steps(run_ranks):
    for sent, stats, planned in run_ranks(_bytes_of_passes, 4, 9):
        assert sent[:3] == sent[4:7] == [0, 0, 0] and sent[8] == 0
        assert sent[3] == sent[7] > 0
        assert planned - 8 <= sent[3] / 4 <= planned * 1.03  # flags, and the padding of the shares
        assert stats["backward_passes"] == 9 and stats["step"] == 3  # the first one made the anchor
        assert stats["step_in_round"] == 1 and stats["outer_gradient_norm"] > 0.01
        assert stats["bytes_uncompressed"] == 9 * 4 * sum(p.numel() for p in make_model().parameters())


def _with_saves(config: commhooks.HookConfig, steps: int, saves: list[int], how: dict[str, Any]) -> Any:
    """Weights at the end of a run that saves after these steps, and of one that also resumes there each time."""
    whole = Run.new(hook=config)
    resumed = Run.new(hook=config)
    for begin, end in zip([0, *saves], [*saves, steps], strict=True):
        whole.train(end - begin)
        resumed.train(end - begin)
        if end in saves:
            whole.save(**how)
            content = resumed.save(**how)
            of_rank_0 = [content]
            dist.broadcast_object_list(of_rank_0)
            content = of_rank_0[0] | {"hook": content["hook"]}  # as the frameworks save
            resumed = Run.new(hook=config).load(content)
    return whole.weights(), resumed.weights(), whole.gradients[-1], resumed.gradients[-1]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("residual", ["per_rank", "mean"])
@pytest.mark.parametrize(
    "config",
    [
        commhooks.DiLoCo(sync_every=3, outer_lr=0.7, outer_momentum=0.5),
        commhooks.DiLoCo(sync_every=4, start_iter=2, wire="int8"),
        commhooks.LocalSGD(sync_every=3),
    ],
    ids=["int4", "late", "local_sgd"],
)
def test_a_run_that_resumes_in_mid_round_goes_on_as_the_other(run_ranks, config, residual, world_size):
    found = run_ranks(_with_saves, config, 14, [2, 7, 9], {"residual": residual}, world_size=world_size)
    for whole, resumed, gradient, same in found:
        assert torch.equal(whole, resumed) and torch.equal(gradient, same)
    assert any(not torch.equal(each[0], found[0][0]) for each in found[1:])  # in mid-round


def _save_some(config: commhooks.HookConfig, steps: int) -> tuple[dict[str, Any], torch.Tensor]:
    run = Run.new(hook=config).train(steps)
    return run.save(residual="mean"), run.weights()


def _go_on(config: commhooks.HookConfig, content: dict[str, Any], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    run = Run.new(hook=config).load(content)
    run.hook.synchronize()
    before = run.weights()
    run.train(steps)
    run.hook.synchronize()
    return before, run.weights()


@pytest.mark.parametrize(("ranks", "later"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_goes_on(run_ranks, ranks, later):
    config = commhooks.DiLoCo(sync_every=3, outer_momentum=0.3)
    saved, weights = run_ranks(_save_some, config, 7, world_size=ranks)[0]
    found = run_ranks(_go_on, config, saved, 4, world_size=later)
    for before, after in found:
        assert torch.equal(before, weights) and torch.equal(after, found[0][1])
        assert not torch.equal(after, weights)


def _alone(every: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run = Run.new(hook="diloco", hook_options={"sync_every": every}).train(every)
    anchor = run.weights()
    run.train(1)
    content = {"model": run.ddp.module.state_dict(), "hook": run.hook.state_dict(joint=False)}
    assert content["hook"]["exact"] is False
    resumed = Run.new(hook="diloco", hook_options={"sync_every": every})
    resumed.ddp.module.load_state_dict(content["model"])
    resumed.hook.load_state_dict(content["hook"])
    resumed.ddp(batch(0, 0)[0])
    return anchor, run.weights(), resumed.weights()


def test_a_save_on_one_rank_alone_holds_the_anchor(run_ranks):
    for anchor, own, resumed in run_ranks(_alone, 3):
        assert torch.equal(resumed, anchor) and not torch.equal(own, anchor)


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
        assert (stats["nonfinite_steps"], stats["step"]) == (1, 2)


def _skips_on_rank_one(every: int, at: int) -> Any:
    run = Run.new(hook=commhooks.LocalSGD(sync_every=every))
    spread = []
    for step in range(2 * every):
        images, labels = batch(step, dist.get_rank())
        run.optimizer.zero_grad()
        nn.functional.cross_entropy(run.ddp(images), labels).backward()
        if not (step == at and dist.get_rank() == 1):
            run.optimizer.step()
        spread.append(run.hook.stats()["step"])
    run.hook.synchronize()
    return spread, run.weights()


def test_a_step_that_one_rank_alone_skips_delays_only_its_outer_step(run_ranks):
    first, second = run_ranks(_skips_on_rank_one, 3, 2)
    assert first[0] == [1, 1, 2, 2, 2, 3]
    assert second[0] == [1, 1, 1, 2, 2, 3]  # at its next forward pass
    assert torch.equal(first[1], second[1])


class _Odd(nn.Module):
    """A BatchNorm, a tied weight, a frozen one, a scalar, an unused buffer with infinities."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([0.1, -torch.inf, 0.7]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.second(torch.tanh(self.norm(self.first(x)))) + self.frozen


def _train_odd(every: int) -> Any:
    model = DistributedDataParallel(_Odd())
    frozen, mask = model.module.frozen.clone(), model.module.mask.clone()
    hook = commhooks.attach(model, "diloco", hook_options={"sync_every": every})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    means = []
    for step in range(2 * every):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())) + dist.get_rank()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 2 * every - 1:
            means = [model.module.norm.running_mean.clone()]
        optimizer.step()
    assert hook.stats()["step"] == 3
    assert torch.equal(frozen, model.module.frozen) and torch.equal(mask, model.module.mask)
    assert model.module.second.weight is model.module.first.weight
    return dict(model.module.state_dict()), means[0]


def test_batchnorm_tied_and_frozen(run_ranks):
    (first, mine), (second, other) = run_ranks(_train_odd, 3)
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert not torch.equal(mine, other)
    torch.testing.assert_close(first["norm.running_mean"], (mine + other) / 2)


def _late(start: int) -> Any:
    late, plain = Run.new(hook=commhooks.DiLoCo(sync_every=3, start_iter=start)), Run.new(hook="allreduce")
    late.train(start)
    plain.train(start)
    same = torch.equal(late.weights(), plain.weights())
    late.train(2)
    return same, late.weights(), late.hook.stats()


def test_the_first_steps_average_gradients(run_ranks):
    first, second = run_ranks(_late, 4)
    assert first[0] and second[0]
    assert not torch.equal(first[1], second[1])
    assert first[2]["bytes_sent"] == 4 * 4 * sum(p.numel() for p in make_model().parameters())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every=0; expected a number of steps, 1 or more"),
        ({"outer_lr": 0.0}, "outer_lr=0.0; expected a number above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0; expected a number from 0"),
        ({"wire": "int2"}, "wire='int2'; expected one of 'float32', 'int8', 'int4'"),
        ({"start_iter": 1.5}, "start_iter=1.5; expected a fraction"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(commhooks.HookConfigError, match=text):
        commhooks.DiLoCo(**options)


def test_wrapper_and_nodes_are_refused():
    from commhooks.hook.request import HookRequest

    with pytest.raises(commhooks.HookConfigError, match="chooses itself what to send"):
        HookRequest.parse("diloco", wrapper="bf16")
    with pytest.raises(commhooks.HookConfigError, match="averages weights instead of gradients"):
        HookRequest.parse("local_sgd", ranks_per_node=2)


def _in_mode(mode: str) -> Any:
    """Six steps in rounds of three; the weights after each round."""
    options = {"static_graph": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(mode, {})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100) if mode == "scaler" else None
    scale = None if scaler is None else scaler.get_scale
    several = 25 if mode == "compile" else SEVERAL_BUCKETS_MB  # torch 2.13 compiles no DDP with small buckets
    run = Run.new(
        hook="local_sgd", hook_options={"sync_every": 3}, ddp=options, loss_scale=scale, bucket_cap_mb=several
    )
    model = torch.compile(run.ddp, backend="eager") if mode == "compile" else run.ddp
    parameters = list(run.ddp.parameters())
    optimizers: list[Any] = [run.optimizer]
    if mode == "two optimizers":
        optimizers = [torch.optim.SGD(parameters[:3], lr=0.05), torch.optim.Adam(parameters[3:], lr=0.01)]
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
    "mode", ["plain", "static_graph", "unused", "accumulate", "two optimizers", "compile", "scaler"]
)
def test_rounds_end_together_in_every_mode(run_ranks, mode):
    (first, stats), (second, _) = run_ranks(_in_mode, mode)
    equal = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
    # With a scaler, rank 1 skips the third step, and the round takes one step more.
    assert equal == [step in ((3,) if mode == "scaler" else (2, 5)) for step in range(6)]
    assert stats["backward_passes"] == 6 and stats["nonfinite_steps"] == 0


def _with_closure() -> Any:
    run = Run.new(hook="local_sgd", hook_options={"sync_every": 4})
    optimizer = torch.optim.LBFGS(run.ddp.parameters(), lr=0.1, max_iter=3)
    after = []
    for step in range(3):
        images, labels = batch(step, dist.get_rank())

        def closure(images: torch.Tensor = images, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run.ddp(images), labels)
            loss.backward()
            return loss

        optimizer.step(closure)
        after.append(run.weights())
    return after, run.hook.stats()["backward_passes"]


def test_closures_count_their_passes(run_ranks):
    (first, passes), (second, same) = run_ranks(_with_closure)
    assert passes == same > 6
    assert [torch.equal(one, other) for one, other in zip(first, second, strict=True)] == [False, True, False]


def _copied_and_pickled() -> Any:
    run = Run.new(hook="local_sgd", hook_options={"sync_every": 2}).train(1)
    copied = copy.deepcopy(run.ddp.module)
    file = io.BytesIO()
    torch.save(run.ddp.module, file)
    file.seek(0)
    run.train(1)
    copied(batch(0, 0)[0]).sum().backward()
    torch.load(file, weights_only=False)(batch(0, 0)[0]).sum().backward()
    hook, runner = run.hook, weakref.ref(run.hook._runner)
    run.ddp, run.optimizer, run.hook = None, None, None  # type: ignore[assignment]
    gc.collect()
    stats = hook.stats()
    del hook, run
    gc.collect()
    return stats["step"], runner() is None


def test_the_model_can_be_copied_and_the_hook_goes_with_it(run_ranks):
    assert run_ranks(_copied_and_pickled) == [(2, True), (2, True)]


def test_sharded_models_are_refused(run_ranks):
    from commhooks.hook.attach import _check_arrangement
    from commhooks.hook.request import HookRequest

    class Source:
        shard_group = object()

    with pytest.raises(commhooks.HookConfigError, match="averages the weights of DDP models only"):
        _check_arrangement(HookRequest.parse("diloco"), Source())  # type: ignore[arg-type]
