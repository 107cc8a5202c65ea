"""Save and resume, once for all: front end x hook x form of the residuals x number of ranks.

Every front end trains the same model on the same batches, saves in the middle and goes on. A run that resumes begins
from other weights and another start step, so that the load must do the work.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint

import commhooks
from accelerate_commhooks import CommHookKwargs
from lightning_commhooks import CommHookDDP
from lightning_commhooks.fabric import CommHookDDP as FabricDDP
from tests.support.accelerators import Training, accelerate_launched
from tests.support.ddp_steps import log_lines
from tests.support.inside import learns
from tests.support.lightning_support import PoolEnvironment, trainer
from tests.support.training import SEVERAL_BUCKETS_MB, Run, batch, flat, make_model, residuals

START, SAVE_AT, STEPS = 2, 4, 7
POWERSGD = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=START)
DILOCO = commhooks.DiLoCo(sync_every=3)  # saved in mid-round


@dataclass(frozen=True)
class Case:
    hook: commhooks.HookConfig
    save_residual: str
    saved_at: int = SAVE_AT

    def resuming(self) -> "Case":
        """With a start step that the load must replace."""
        if isinstance(self.hook, commhooks.PowerSGD):
            return replace(self, hook=replace(self.hook, start_powerSGD_iter=900))
        return self

    @property
    def settings(self) -> dict[str, Any]:
        return {"hook": self.hook, "save_residual": self.save_residual}


CASES = {
    "per rank": Case(POWERSGD, "per_rank"),
    "mean": Case(POWERSGD, "mean"),
    "before the start": Case(POWERSGD, "mean", saved_at=START - 1),
    "local steps": Case(DILOCO, "mean"),
}


@dataclass
class Outcome:
    """What came of a training on this rank. `saved`, `loaded`: its residuals at the save, after the load."""

    weights: torch.Tensor
    stats: dict[str, Any]
    residuals: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]

    @classmethod
    def of(cls, weights: torch.Tensor, hook: commhooks.CommHook, saved: Any = None, loaded: Any = None) -> "Outcome":
        return cls(weights, hook.stats(), memory(hook), saved or {}, loaded or {})


def memory(hook: commhooks.CommHook | None) -> dict[str, torch.Tensor]:
    assert hook is not None
    return residuals(hook) if learns(hook) else {}


# ---- front ends: train, save in the middle and go on, or resume from there ------------------------------------------


def attach(folder: str, case: Case, resume: bool) -> Outcome:
    run, loaded = Run.new(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB, **case.settings), None
    if resume:
        spoil(run.ddp)
        run.load(torch.load(f"{folder}/state.pt", weights_only=True))
        loaded = memory(run.hook)
    run.train(0 if resume else case.saved_at)
    saved = None
    if not resume:
        content = run.save(gather=case.save_residual == "per_rank")
        saved = memory(run.hook)
        if dist.get_rank() == 0:
            torch.save(content, f"{folder}/state.pt")
    return Outcome.of(run.train(STEPS - case.saved_at).weights(), run.hook, saved, loaded)


def accelerate(folder: str, case: Case, resume: bool) -> Outcome:
    with accelerate_launched():
        run, saved, loaded = Training(CommHookKwargs(bucket_cap_mb=SEVERAL_BUCKETS_MB, **case.settings)), None, None
        if resume:
            spoil(run.model)
            run.load(folder, case.saved_at)
            loaded = memory(run.hook)
        else:
            run.train(case.saved_at).save(folder)
            saved = memory(run.hook)
        return Outcome.of(run.train(STEPS - case.saved_at).weights(), run.hook, saved, loaded)


def fabric(folder: str, case: Case, resume: bool) -> Outcome:
    strategy = FabricDDP(bucket_cap_mb=SEVERAL_BUCKETS_MB, **case.settings)
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[PoolEnvironment()])
    made.launch()
    net = make_model()
    model, optimizer = made.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    state, saved, loaded = {"model": model, "optimizer": optimizer, "step": 0}, None, None

    def train(steps: range) -> None:
        for step in steps:
            images, labels = batch(step, dist.get_rank())
            optimizer.zero_grad()
            made.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()

    if resume:
        spoil(net)
        made.load(f"{folder}/state.ckpt", state)
        assert state["step"] == case.saved_at
        loaded = memory(strategy.comm_hook)
    else:
        train(range(case.saved_at))
        made.save(f"{folder}/state.ckpt", state | {"step": case.saved_at})
        saved = memory(strategy.comm_hook)
    train(range(case.saved_at, STEPS))
    return Outcome.of(flat(net.parameters()), strategy.comm_hook, saved, loaded)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, *_: Any) -> torch.Tensor:
        images, labels = batch(self.trainer.global_step, dist.get_rank())
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Memory(pl.Callback):
    """The residuals when the training begins, and after each step, before its checkpoint; the weights at the end."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.at[trainer.global_step] = memory(trainer.strategy.comm_hook)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.at[trainer.global_step] = memory(trainer.strategy.comm_hook)


def lightning(folder: str, case: Case, resume: bool) -> Outcome:
    noted, module = Memory(), Module()
    callbacks: list[pl.Callback] = [noted]
    if not resume:
        callbacks.append(ModelCheckpoint(folder, filename="state", every_n_train_steps=case.saved_at, save_top_k=-1))
    else:
        spoil(module)
    made = trainer(
        folder,
        strategy=CommHookDDP(bucket_cap_mb=SEVERAL_BUCKETS_MB, **case.settings),
        max_steps=STEPS,
        callbacks=callbacks,
    )
    loader = torch.utils.data.DataLoader(torch.zeros(100, 1))
    made.fit(module, loader, ckpt_path=f"{folder}/state.ckpt" if resume else None)
    first = noted.at.get(case.saved_at, {})  # after the save, which with "mean" changes them
    return Outcome.of(flat(module.parameters()), made.strategy.comm_hook, first, first)


FRONT_ENDS: dict[str, Callable[[str, Case, bool], Outcome]] = {
    "attach": attach,
    "Trainer": lightning,
    "Fabric": fabric,
    "Accelerate": accelerate,
}


def spoil(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def run_front_end(front_end: str, folder: str, case: Case, resume: bool) -> tuple[Outcome, list[str]]:
    with log_lines(("commhooks", "lightning_commhooks", "accelerate_commhooks"), 30) as warned:
        outcome = FRONT_ENDS[front_end](folder, case.resuming() if resume else case, resume)
    return outcome, list(warned)


def saved_and_resumed(front_end: str, folder: str, case: Case) -> tuple[Outcome, Outcome, list[str]]:
    through, warned = run_front_end(front_end, folder, case, False)
    dist.barrier()
    resumed, more = run_front_end(front_end, folder, case, True)
    return through, resumed, warned + more


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# `attach` with every hook and wrapper: test_every_compressor.py.
TRIED = [(front, case) for front in list(FRONT_ENDS)[1:] for case in ("per rank", "mean", "local steps")]


@pytest.mark.parametrize(("front_end", "case"), [*TRIED, ("attach", "before the start")])
def test_a_resumed_run_is_bit_equal(run_ranks: Any, tmp_path: Any, front_end: str, case: str) -> None:
    tried = CASES[case]
    ranks = run_ranks(saved_and_resumed, front_end, str(tmp_path), tried)
    for through, resumed, warned in ranks:
        assert torch.equal(through.weights, resumed.weights)
        assert same(through.residuals, resumed.residuals)
        assert warned == []
        if tried.hook != DILOCO:
            assert torch.equal(resumed.weights, ranks[0][1].weights)
            assert resumed.stats["step"] == STEPS
            assert resumed.stats["compressed_steps"] == STEPS - max(tried.saved_at, START)
            assert resumed.stats["collectives_last_pass"] >= 3  # several buckets
            assert any(each.any() for each in resumed.residuals.values())
    if tried.save_residual == "mean":
        assert all(same(resumed.loaded, ranks[0][1].loaded) for _, resumed, _ in ranks)
    elif tried.hook != DILOCO:
        assert not same(ranks[0][1].loaded, ranks[1][1].loaded)


def test_without_residuals_the_resumed_run_differs(run_ranks: Any, tmp_path: Any) -> None:
    """`save_residual="drop"`; and the comparison above sees what is lost."""
    ranks = run_ranks(saved_and_resumed, "attach", str(tmp_path), Case(POWERSGD, "drop"))
    for through, resumed, warned in ranks:
        assert resumed.loaded == {} and warned == []
        assert not torch.equal(through.weights, resumed.weights)
        assert torch.equal(resumed.weights, ranks[0][1].weights)
        assert resumed.stats["step"] == STEPS


# `attach`, from any number of ranks to any other: test_elastic_resume.py.
@pytest.mark.parametrize(("front_end", "after"), [("Trainer", 1), ("Fabric", 1), ("Accelerate", 3)])
def test_another_number_of_ranks_goes_on_with_the_mean(
    run_ranks: Any, tmp_path: Any, front_end: str, after: int
) -> None:
    """Only the mean of the residuals over the ranks has an effect, so that it is what must be kept."""
    saved = run_ranks(run_front_end, front_end, str(tmp_path), CASES["per rank"], False, world_size=2)
    resumed = run_ranks(run_front_end, front_end, str(tmp_path), CASES["per rank"], True, world_size=after)
    for outcome, warned in resumed:
        assert warned == []
        assert outcome.stats["step"] == STEPS and outcome.stats["compressed_steps"] == STEPS - SAVE_AT
        assert torch.equal(outcome.weights, resumed[0][0].weights)
        for name, mine in outcome.loaded.items():
            mean = torch.stack([each.saved[name] for each, _ in saved]).double().mean(0)
            assert mean.norm() > 0
            assert (mean - mine).norm() <= 1e-6 * mean.norm()
        assert outcome.loaded.keys() == saved[0][0].saved.keys() != set()
