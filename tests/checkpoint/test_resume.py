"""What a resumed run equals: front end x hook x form of the residuals, and from any number of ranks
to any other.

Every front end trains the same model on the same batches, saves in the middle and goes on. A run
that resumes begins from other weights and another start step, so that the load must do the work.
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
from commhooks.checkpoint import parts as payload_parts
from lightning_commhooks import CommHookDDP
from lightning_commhooks.fabric import CommHookDDP as FabricDDP
from tests.support.accelerators import Training, accelerate_launched
from tests.support.ddp_steps import log_lines
from tests.support.inside import learns
from tests.support.lightning_support import PoolEnvironment, trainer
from tests.support.training import SEVERAL_BUCKETS_MB, Run, batch, flat, make_model, residuals

START, SAVE_AT, STEPS = 2, 4, 7
POWERSGD = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=START)
RANK_2 = {"matrix_approximation_rank": 2, "start_powerSGD_iter": START}
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
    """What came of a training on this rank. `saved`, `loaded`: its residuals at the save, after the
    load.
    """

    weights: torch.Tensor
    stats: dict[str, Any]
    residuals: dict[str, torch.Tensor]
    saved: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls, weights: torch.Tensor, hook: commhooks.CommHook, saved: Any = None, loaded: Any = None
    ) -> "Outcome":
        return cls(weights, hook.stats(), memory(hook), saved or {}, loaded or {})


def memory(hook: commhooks.CommHook | None) -> dict[str, torch.Tensor]:
    assert hook is not None
    return residuals(hook) if learns(hook) else {}


# ---- front ends: train, save in the middle and go on, or resume from there
# ------------------------------------------


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
        run, saved, loaded = (
            Training(CommHookKwargs(bucket_cap_mb=SEVERAL_BUCKETS_MB, **case.settings)),
            None,
            None,
        )
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
    made = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[PoolEnvironment()],
    )
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
    """The residuals when the training begins, and after each step, before its checkpoint; the
    weights at the end.
    """

    def __init__(self) -> None:
        self.at: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.at[trainer.global_step] = memory(trainer.strategy.comm_hook)

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        self.at[trainer.global_step] = memory(trainer.strategy.comm_hook)


def lightning(folder: str, case: Case, resume: bool) -> Outcome:
    noted, module = Memory(), Module()
    callbacks: list[pl.Callback] = [noted]
    if not resume:
        callbacks.append(
            ModelCheckpoint(
                folder, filename="state", every_n_train_steps=case.saved_at, save_top_k=-1
            )
        )
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


def run_front_end(
    front_end: str, folder: str, case: Case, resume: bool
) -> tuple[Outcome, list[str]]:
    with log_lines(("commhooks", "lightning_commhooks", "accelerate_commhooks"), 30) as warned:
        outcome = FRONT_ENDS[front_end](folder, case.resuming() if resume else case, resume)
    return outcome, list(warned)


def saved_and_resumed(
    front_end: str, folder: str, case: Case
) -> tuple[Outcome, Outcome, list[str]]:
    through, warned = run_front_end(front_end, folder, case, False)
    dist.barrier()
    resumed, more = run_front_end(front_end, folder, case, True)
    return through, resumed, warned + more


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# `attach` with every hook and wrapper: test_every_compressor.py.
TRIED = [
    (front, case) for front in list(FRONT_ENDS)[1:] for case in ("per rank", "mean", "local steps")
]


@pytest.mark.parametrize(("front_end", "case"), [*TRIED, ("attach", "before the start")])
def test_a_resumed_run_is_bit_equal(
    run_ranks: Any, tmp_path: Any, front_end: str, case: str
) -> None:
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


# `attach`, from any number of ranks to any other: below.
@pytest.mark.parametrize(("front_end", "after"), [("Trainer", 1), ("Fabric", 1), ("Accelerate", 3)])
def test_another_number_of_ranks_goes_on_with_the_mean(
    run_ranks: Any, tmp_path: Any, front_end: str, after: int
) -> None:
    """Only the mean of the residuals over the ranks has an effect, so that it is what must be
    kept.
    """
    saved = run_ranks(
        run_front_end, front_end, str(tmp_path), CASES["per rank"], False, world_size=2
    )
    resumed = run_ranks(
        run_front_end, front_end, str(tmp_path), CASES["per rank"], True, world_size=after
    )
    for outcome, warned in resumed:
        assert warned == []
        assert (
            outcome.stats["step"] == STEPS and outcome.stats["compressed_steps"] == STEPS - SAVE_AT
        )
        assert torch.equal(outcome.weights, resumed[0][0].weights)
        for name, mine in outcome.loaded.items():
            mean = torch.stack([each.saved[name] for each, _ in saved]).double().mean(0)
            assert mean.norm() > 0
            assert (mean - mine).norm() <= 1e-6 * mean.norm()
        assert outcome.loaded.keys() == saved[0][0].saved.keys() != set()


def _rewind() -> tuple[torch.Tensor, torch.Tensor, int]:
    """A state loaded into a hook that has run already, as the learning-rate finder does."""
    saved = Run.new(hook_options=RANK_2).train(4).save()
    other = Run.new(hook_options=RANK_2 | {"start_powerSGD_iter": 900}).train(2)
    handshakes = other.hook.stats()["handshakes"]
    other.load(saved).train(2)
    straight = Run.new(hook_options=RANK_2).train(6)
    return other.weights(), straight.weights(), other.hook.stats()["handshakes"] - handshakes


def test_loading_into_a_running_hook(run_ranks: Any) -> None:
    for rewound, straight, handshakes in run_ranks(_rewind):
        assert torch.equal(rewound, straight)
        assert handshakes == 1


# ---- another number of ranks
# -----------------------------------------------------------------------------------------


OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
WORLDS = (1, 2, 4)
SAMPLES = 12


def _samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten kinds of noisy 8 x 8 images, and which kind each is."""
    kinds = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return kinds[labels] + 0.8 * torch.randn(count, 1, 8, 8, generator=generator), labels


def _train(run: Run, steps: int) -> Run:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        images, labels = _samples(100_000 + run.step, SAMPLES)
        run.optimizer.zero_grad()
        own = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
        torch.nn.functional.cross_entropy(run.ddp(images[own]), labels[own]).backward()
        run.optimizer.step()
        run.step += 1
    return run


def _save(run: Run, how: str) -> Any:
    """ "gathered": the residuals of all ranks in one payload; "parts": one file for all and one per
     rank. The mean:
    test_every_compressor.py.
    """
    saved = run.save(residual="per_rank", gather=how == "gathered")
    if how == "parts":
        saved["hook"] = payload_parts.split(saved["hook"], dist.get_rank())
    return saved


def _load(run: Run, saved: list[Any], how: str) -> Run:
    """`saved`: what `_save` returned, by rank of the world that saved."""
    content = saved[0]
    if how == "parts":
        shared, rank, world_size = saved[0]["hook"][0], dist.get_rank(), dist.get_world_size()
        needed = payload_parts.ranks_needed(shared, rank, world_size)
        parts = [saved[each]["hook"][1] for each in needed]
        content = {**content, "hook": payload_parts.merge(shared, parts, rank, world_size)}
    return run.load(content)


def _assert_same_mean(
    before: list[dict[str, torch.Tensor]], after: list[dict[str, torch.Tensor]]
) -> None:
    """Of every parameter's residual over the ranks, to rounding."""
    assert len(before[0]) == 4 and all(each.keys() == before[0].keys() for each in before + after)
    for name in before[0]:
        old = torch.stack([each[name] for each in before]).double().mean(0)
        new = torch.stack([each[name] for each in after]).double().mean(0)
        assert old.norm() > 0
        assert (old - new).norm() <= 1e-6 * old.norm(), name


def _save_in_every_way() -> dict[str, Any]:
    run = _train(Run.new(hook_options=OPTIONS), 3)
    own = residuals(run.hook)
    saved = {how: _save(run, how) for how in ("gathered", "parts")}
    return {"saved": saved, "residuals": own, "then": _train(run, 1).weights()}


def _load_in_every_way(saved: dict[int, list[dict[str, Any]]]) -> dict[tuple[int, str], Any]:
    results = {}
    for before, by_rank in saved.items():
        for how in ("gathered", "parts"):
            run = _load(
                Run.new(hook_options=OPTIONS | {"start_powerSGD_iter": 900}),
                [each[how] for each in by_rank],
                how,
            )
            loaded = residuals(run.hook)
            weights = _train(run, 1).weights()
            results[before, how] = {
                "residuals": loaded,
                "weights": weights,
                "stats": run.hook.stats(),
            }
    return results


@pytest.fixture(scope="module")
def saved_in_every_world(worker_pool: Any) -> dict[int, list[Any]]:
    return {
        world_size: worker_pool.run(_save_in_every_way, world_size=world_size)
        for world_size in WORLDS
    }


@pytest.mark.parametrize("after", WORLDS)
def test_from_any_number_of_ranks(
    run_ranks: Any, saved_in_every_world: dict[int, list[Any]], after: int
) -> None:
    saved = {
        before: [rank["saved"] for rank in ranks] for before, ranks in saved_in_every_world.items()
    }
    results = run_ranks(_load_in_every_way, saved, world_size=after)
    for (before, how), first in results[0].items():
        ranks = [result[before, how] for result in results]
        old = [rank["residuals"] for rank in saved_in_every_world[before]]
        _assert_same_mean(old, [rank["residuals"] for rank in ranks])
        if before == after:  # then each rank has its own again, to the bit
            for mine, theirs in zip(old, (rank["residuals"] for rank in ranks), strict=True):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        for rank in ranks:
            assert torch.equal(rank["weights"], first["weights"])
            assert rank["stats"]["step"] == 4 and rank["stats"]["compressed_steps"] == 1
            for expected in (
                saved_in_every_world[before][0]["then"],
                saved_in_every_world[2][0]["then"],
            ):
                assert (rank["weights"] - expected).norm() <= 1e-5 * expected.norm()
