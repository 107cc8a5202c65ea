"""A run that resumes equals one that was not interrupted, with any front end and number of ranks.

Every front end trains the same model on the same batches, saves in the middle and goes on. A run
that resumes begins from other weights and another start step, so that the load must do the work.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.parallel import DistributedDataParallel

import commhooks
from accelerate_commhooks import CommHookKwargs
from commhooks.checkpoint import parts as payload_parts
from commhooks.checkpoint.payload import residuals_in
from lightning_commhooks import CommHookDDP
from lightning_commhooks.fabric import CommHookDDP as FabricDDP
from tests.support.accelerators import Training, accelerate_launched
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.inside import learns
from tests.support.lightning_support import PoolEnvironment, trainer
from tests.support.models import bits_equal, same
from tests.support.training import SEVERAL_BUCKETS_MB, Run, batch, flat, make_model, residuals

START = 2
SAVE_AT = 4
STEPS = 7
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
    """What came of a run on this rank.

    `saved`, `loaded`: its residuals at the save and after the load.
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


def attach(folder: str, case: Case, resume: bool) -> Outcome:
    run = Run.new(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB, **case.settings)
    saved = loaded = None
    if resume:
        spoil(run.ddp)
        run.load(torch.load(f"{folder}/state.pt", weights_only=True))
        loaded = memory(run.hook)
    else:
        run.train(case.saved_at)
        content = run.save(gather=case.save_residual == "per_rank")
        saved = memory(run.hook)
        if dist.get_rank() == 0:
            torch.save(content, f"{folder}/state.pt")
    return Outcome.of(run.train(STEPS - case.saved_at).weights(), run.hook, saved, loaded)


def accelerate(folder: str, case: Case, resume: bool) -> Outcome:
    with accelerate_launched():
        run = Training(CommHookKwargs(bucket_cap_mb=SEVERAL_BUCKETS_MB, **case.settings))
        saved = loaded = None
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
    state = {"model": model, "optimizer": optimizer, "step": 0}
    saved = loaded = None

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
    """Notes the residuals when the run begins, and before each step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.at[trainer.global_step] = memory(trainer.strategy.comm_hook)

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        self.at[trainer.global_step] = memory(trainer.strategy.comm_hook)


def lightning(folder: str, case: Case, resume: bool) -> Outcome:
    noted = Memory()
    module = Module()
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
    # After the save, which with "mean" changes them.
    at_save = noted.at.get(case.saved_at, {})
    return Outcome.of(flat(module.parameters()), made.strategy.comm_hook, at_save, at_save)


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
        assert bits_equal(through.residuals, resumed.residuals)
        assert warned == []
        if tried.hook != DILOCO:
            assert torch.equal(resumed.weights, ranks[0][1].weights)
            assert resumed.stats["step"] == STEPS
            assert resumed.stats["compressed_steps"] == STEPS - max(tried.saved_at, START)
            assert resumed.stats["collectives_last_pass"] >= 3  # several buckets
            assert any(residual.any() for residual in resumed.residuals.values())
    if tried.save_residual == "mean":
        assert all(bits_equal(resumed.loaded, ranks[0][1].loaded) for _, resumed, _ in ranks)
    elif tried.hook != DILOCO:
        assert not bits_equal(ranks[0][1].loaded, ranks[1][1].loaded)


# `attach`, from any number of ranks to any other: below.
@pytest.mark.parametrize(("front_end", "after"), [("Trainer", 1), ("Fabric", 1), ("Accelerate", 3)])
def test_another_number_of_ranks_goes_on_with_the_mean(
    run_ranks: Any, tmp_path: Any, front_end: str, after: int
) -> None:
    """Only the mean of the residuals over the ranks has an effect, so it must be kept."""
    saved = run_ranks(
        run_front_end, front_end, str(tmp_path), CASES["per rank"], False, world_size=2
    )
    resumed = run_ranks(
        run_front_end, front_end, str(tmp_path), CASES["per rank"], True, world_size=after
    )
    for outcome, warned in resumed:
        assert warned == []
        assert outcome.stats["step"] == STEPS
        assert outcome.stats["compressed_steps"] == STEPS - SAVE_AT
        assert torch.equal(outcome.weights, resumed[0][0].weights)
        for name, loaded in outcome.loaded.items():
            mean = torch.stack([of_rank.saved[name] for of_rank, _ in saved]).double().mean(0)
            assert mean.norm() > 0
            assert (mean - loaded).norm() <= 1e-6 * mean.norm()
        assert outcome.loaded.keys() == saved[0][0].saved.keys() != set()


def _rewind() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Load a state into a hook that has run already, as the learning-rate finder does."""
    saved = Run.new(hook_options=RANK_2).train(4).save()
    other = Run.new(hook_options=RANK_2 | {"start_powerSGD_iter": 900}).train(2)
    handshakes = other.hook.stats()["handshakes"]
    other.load(saved).train(2)
    straight = Run.new(hook_options=RANK_2).train(6)
    return other.weights(), straight.weights(), other.hook.stats()["handshakes"] - handshakes


def test_a_running_hook_that_loads_goes_on_from_there(run_ranks: Any) -> None:
    for rewound, straight, handshakes in run_ranks(_rewind):
        assert torch.equal(rewound, straight)
        assert handshakes == 1


# ---- another number of ranks


OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
WORLDS = (1, 2, 4)
SAMPLES = 12


def _samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make noisy 8 x 8 images of ten kinds, and their kinds."""
    kinds = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return kinds[labels] + 0.8 * torch.randn(count, 1, 8, 8, generator=generator), labels


def _train(run: Run, steps: int) -> Run:
    per_rank = SAMPLES // dist.get_world_size()
    rows = slice(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)
    for _ in range(steps):
        images, labels = _samples(100_000 + run.step, SAMPLES)
        run.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run.ddp(images[rows]), labels[rows]).backward()
        run.optimizer.step()
        run.step += 1
    return run


def _save(run: Run, how: str) -> Any:
    """Save "gathered", all residuals in one payload, or in "parts", one for all and one per rank.

    The mean: test_every_compressor.py.
    """
    saved = run.save(residual="per_rank", gather=how == "gathered")
    if how == "parts":
        saved["hook"] = payload_parts.split(saved["hook"], dist.get_rank())
    return saved


def _load(run: Run, saved: list[Any], how: str) -> Run:
    """Load what `_save` returned on each rank of the run that saved."""
    content = saved[0]
    if how == "parts":
        shared = saved[0]["hook"][0]
        ranks = (dist.get_rank(), dist.get_world_size())
        parts = [saved[writer]["hook"][1] for writer in payload_parts.ranks_needed(shared, *ranks)]
        content = {**content, "hook": payload_parts.merge(shared, parts, *ranks)}
    return run.load(content)


def _assert_same_mean(
    before: list[dict[str, torch.Tensor]], after: list[dict[str, torch.Tensor]]
) -> None:
    """Assert that the mean residual over the ranks is the same, to rounding."""
    assert len(before[0]) == 4
    assert all(residuals.keys() == before[0].keys() for residuals in before + after)
    for name in before[0]:
        old = torch.stack([residuals[name] for residuals in before]).double().mean(0)
        new = torch.stack([residuals[name] for residuals in after]).double().mean(0)
        assert old.norm() > 0
        assert (old - new).norm() <= 1e-6 * old.norm(), name


def _save_in_every_way() -> dict[str, Any]:
    run = _train(Run.new(hook_options=OPTIONS), 3)
    kept = residuals(run.hook)
    saved = {how: _save(run, how) for how in ("gathered", "parts")}
    return {"saved": saved, "residuals": kept, "then": _train(run, 1).weights()}


def _load_in_every_way(saved: dict[int, list[dict[str, Any]]]) -> dict[tuple[int, str], Any]:
    results = {}
    for before, by_rank in saved.items():
        for how in ("gathered", "parts"):
            run = Run.new(hook_options=OPTIONS | {"start_powerSGD_iter": 900})
            _load(run, [saved_in[how] for saved_in in by_rank], how)
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
def test_a_run_resumes_from_any_number_of_ranks(
    run_ranks: Any, saved_in_every_world: dict[int, list[Any]], after: int
) -> None:
    saved = {}
    for before, ranks in saved_in_every_world.items():
        saved[before] = [rank["saved"] for rank in ranks]
    results = run_ranks(_load_in_every_way, saved, world_size=after)
    for (before, how), first in results[0].items():
        ranks = [result[before, how] for result in results]
        old = [rank["residuals"] for rank in saved_in_every_world[before]]
        _assert_same_mean(old, [rank["residuals"] for rank in ranks])
        if before == after:  # then each rank has its own residuals again, to the bit
            for saved_residuals, rank in zip(old, ranks, strict=True):
                assert bits_equal(saved_residuals, rank["residuals"])
        for rank in ranks:
            assert torch.equal(rank["weights"], first["weights"])
            assert rank["stats"]["step"] == 4 and rank["stats"]["compressed_steps"] == 1
            for expected in (
                saved_in_every_world[before][0]["then"],
                saved_in_every_world[2][0]["then"],
            ):
                assert (rank["weights"] - expected).norm() <= 1e-5 * expected.norm()


# ---- the line that says where the run resumes

FROM_STEP_3 = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}


def _resumed(saved: dict[str, Any], hook: str = "powerSGD", **attach: Any) -> tuple[Run, list[str]]:
    with log_lines("commhooks.summary", logging.INFO) as lines:
        run = Run.new(hook=hook, **attach).load(saved)
    return run, lines


def _lines() -> dict[str, list[str]]:
    run = Run.new(hook_options=FROM_STEP_3)
    start = run.save(residual="mean")
    plain = run.train(2).save(residual="mean")
    run.train(3)
    saved = {
        "per_rank": run.save(residual="per_rank", gather=True),
        "mean": run.save(residual="mean"),
        "drop": run.save(residual="drop"),
        "start": start,
        "plain": plain,
    }
    lines = {how: _resumed(content, hook_options=FROM_STEP_3)[1] for how, content in saved.items()}
    nothing = {"exclude": ["*"]}
    without = Run.new(hook="int8", hook_options=nothing).train(2).save(residual="mean")
    lines["without"] = _resumed(without, "int8", hook_options=nothing)[1]
    lines["bf16"] = _resumed(Run.new(hook="bf16").train(2).save(), "bf16")[1]
    return lines


def test_one_line_says_where_the_run_resumes(run_ranks: Any) -> None:
    first, other = run_ranks(_lines)
    assert first == {
        "per_rank": ["commhooks: powerSGD resumed at step 5; residuals: each rank's own"],
        "mean": ["commhooks: powerSGD resumed at step 5; residuals: mean of 2 ranks"],
        "drop": ["commhooks: powerSGD resumed at step 5; residuals: none, they start from zero"],
        "start": [],
        "plain": ["commhooks: powerSGD resumed at step 2; not yet compressing"],
        "bf16": ["commhooks: bf16_compress resumed at step 2"],
        "without": ["commhooks: int8_compress resumed at step 2; no parameter has a residual"],
    }
    assert not any(other.values())


def _saved_at(step: int) -> dict[str, Any]:
    return Run.new(hook_options=FROM_STEP_3).train(step).save(residual="per_rank", gather=True)


def _loaded(saved: dict[str, Any]) -> list[str]:
    return _resumed(saved, hook_options=FROM_STEP_3)[1]


def test_the_line_names_another_number_of_ranks(run_ranks: Any) -> None:
    saved = run_ranks(_saved_at, 4)[0]
    ((line,),) = run_ranks(_loaded, saved, world_size=1)
    assert line == "commhooks: powerSGD resumed at step 4; residuals: mean of 2 ranks"
    saved = run_ranks(_saved_at, 2)[0]
    ((line,),) = run_ranks(_loaded, saved, world_size=1)
    assert line == "commhooks: powerSGD resumed at step 2; not yet compressing"


def _other_starts() -> dict[str, list[str]]:
    run = Run.new(hook_options=FROM_STEP_3).train(2)
    early = run.save()
    late = run.train(2).save()
    lines = {}
    for name, saved in (("early", early), ("late", late)):
        for start in (3, 4, 0):
            again, lines[f"{name}, {start}"] = _resumed(
                saved, hook_options=FROM_STEP_3 | {"start_powerSGD_iter": start}
            )
            assert again.hook.options["start_powerSGD_iter"] == 3
    return lines


def test_the_line_names_an_overruled_start_that_is_still_ahead(run_ranks: Any) -> None:
    lines = {name: line for name, (line,) in run_ranks(_other_starts)[0].items()}
    named = {name for name, line in lines.items() if "start_powerSGD_iter=" in line}
    assert named == {"early, 4", "early, 0"}  # at step 4 both starts are behind
    assert lines["early, 4"].endswith("; start_powerSGD_iter=3 as it was saved, not 4")


# ---- counters


def _counted(hook: str) -> dict[str, Any]:
    options = {"hook_options": FROM_STEP_3} if hook == "powerSGD" else {}
    through = Run.new(hook=hook, **options).train(5)
    saved = through.save()
    through.train(3)
    again, _ = _resumed(saved, hook, **options)
    loaded = again.hook.stats()["so_far"]
    again.train(3)
    stats = again.hook.stats()
    rewound = again.load(saved).hook.stats()["so_far"]
    return {
        "saved": saved["hook"]["counters"],
        "loaded": loaded,
        "rewound": rewound,
        "through": through.hook.stats()["so_far"],
        "again": stats["so_far"],
        "since attach": {name: stats[name] for name in stats["so_far"]},
    }


@pytest.mark.parametrize("hook", ["powerSGD", "bf16"])
def test_the_counters_so_far_go_on(run_ranks: Any, hook: str) -> None:
    for rank in run_ranks(_counted, hook):
        assert rank["again"] == rank["through"] and rank["again"]["backward_passes"] == 8
        assert rank["since attach"]["backward_passes"] == 3
        loaded = {name: count for name, count in rank["loaded"].items() if count is not None}
        assert loaded and loaded == {name: rank["saved"][name] for name in loaded}
        assert rank["rewound"] == rank["loaded"]
        assert rank["saved"]["bytes_sent"] > 0 and rank["saved"]["backward_passes"] == 5


# ---- what is saved


@pytest.mark.parametrize("hook", ["powerSGD", "batched_powerSGD"])
def test_a_saved_state_does_not_change_afterwards(run_ranks: Any, hook: str) -> None:
    assert run_ranks(_saved_stays, hook) == [True, True]


def _saved_stays(hook: str) -> bool:
    run = Run.new(hook=hook, hook_options=OPTIONS).train(4)
    saved = run.hook.state_dict()
    before = copy.deepcopy(saved)
    run.train(2)
    return same(saved, before)


def test_a_parameter_without_dimensions_is_saved_and_loaded() -> None:
    with process_group_of_one():
        ddp = DistributedDataParallel(torch.nn.ParameterDict({"scale": torch.ones(())}))
        hook = commhooks.attach(ddp, "powerSGD", hook_options=OPTIONS)
        saved = hook.state_dict()
        assert saved["parameters"]["scale"]["shape"] == []
        hook.load_state_dict(saved)


def _sizes(save_residual: str) -> tuple[int, int, str]:
    """Return the bytes of residuals that this rank saves, and what the plan says of all ranks."""
    run = Run.new(hook_options=FROM_STEP_3, save_residual=save_residual).train(4)
    saved = 0
    for entry in run.save()["hook"]["parameters"].values():
        saved += sum(residual.nbytes for residual in residuals_in(entry))
    plan = run.hook.plan()
    with mock.patch("commhooks.plan.NAMED_SAVE_BYTES", 1):
        return saved, plan.saved_residuals, f"{plan}{plan.summary()}"


@pytest.mark.parametrize("save_residual", ["per_rank", "mean", "drop"])
def test_the_plan_names_the_bytes_of_residuals_in_a_checkpoint(
    run_ranks: Any, save_residual: str
) -> None:
    ranks = run_ranks(_sizes, save_residual)
    written = sum(size for size, *_ in ranks) if save_residual == "per_rank" else ranks[0][0]
    for _, planned, text in ranks:
        assert planned == written and bool(written) == (save_residual != "drop")
        assert ("Residuals in a checkpoint of all ranks: " in text) == bool(written)
        assert ("0.0 GB of residuals in a checkpoint of all ranks" in text) == bool(written)
