"""Training with CommHookDDP does what it does with DDPStrategy, and compresses."""

import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateFinder
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, IterableDataset

from commhooks import PowerSGD
from lightning_commhooks import CommHookDDP
from tests.support import lightning_support as support
from tests.support.lightning_support import (
    SAVED_AT,
    Model,
    assert_equal,
    data,
    fit,
    path_at,
    strategy,
    trainer,
    weights,
)


def _plain(t: pl.Trainer, model: Model) -> None:
    t.fit(model, data())


def _one_after_another(t: pl.Trainer, model: Model) -> None:
    """Also as scripts do that need the process group before there is a module."""
    t.strategy.setup_environment()
    t.validate(model, data(), verbose=False)
    assert getattr(t.strategy, "comm_hook", None) is None
    t.fit(model, data(), data())
    first = getattr(t.strategy, "comm_hook", None)
    t.fit_loop.max_epochs = 3
    t.fit(model, data(), data())
    assert first is None or t.strategy.comm_hook is not first
    ours = [callback for callback in t.callbacks if type(callback).__name__ == "CommHookRoundEnd"]
    assert len(ours) == isinstance(t.strategy, CommHookDDP)


def _tuner(t: pl.Trainer, model: Model) -> None:
    Tuner(t).lr_find(model, data(), num_training=6, update_attr=True)
    t.fit(model, data())


CASES: dict[str, tuple[Callable[[pl.Trainer, Model], None], type[Model], dict[str, Any]]] = {
    "one after another": (_one_after_another, Model, {"max_epochs": 1}),
    "tuner": (_tuner, Model, {}),
    "several optimizers": (_plain, support.TwoOptimizersModel, {}),
    "accumulation": (_plain, Model, {"accumulate_grad_batches": 2}),
}
# Backward passes of the last fit where it is not 2 epochs of 4 steps.
PASSES = {"several optimizers": 16, "accumulation": 4}


def _three_strategies(root: str, case: str) -> dict[str, Any]:
    run, make, options = CASES[case]
    out: dict[str, Any] = {}
    for name, chosen in {
        "ddp": DDPStrategy(bucket_cap_mb=support.SEVERAL_BUCKETS_MB),
        "allreduce": strategy(hook="allreduce"),
        "powerSGD": strategy(),
    }.items():
        t = trainer(root, strategy=chosen, **{"max_epochs": 2} | options)
        model = make()
        run(t, model)
        out[name] = weights(model)
        if name != "ddp":
            out[f"{name} stats"] = t.strategy.comm_hook.stats()
    return out


@pytest.mark.parametrize("case", CASES)
def test_a_fit_trains_as_with_ddp_strategy(run_ranks: Any, tmp_path: Path, case: str) -> None:
    ranks = run_ranks(_three_strategies, str(tmp_path), case, timeout_s=100)
    for name in ("ddp", "allreduce", "powerSGD"):
        assert_equal(ranks[0][name], ranks[1][name])
    assert_equal(ranks[0]["ddp"], ranks[0]["allreduce"])
    # PowerSGD trains another way, but trains.
    start = weights(CASES[case][1]())
    assert support.difference(ranks[0]["powerSGD"], ranks[0]["ddp"]) > 1e-7
    assert support.difference(ranks[0]["powerSGD"], start) > 1e-4
    for rank in ranks:
        stats = rank["powerSGD stats"]
        passes = PASSES.get(case, 8)
        assert stats["step"] == stats["backward_passes"] == passes
        assert stats["compressed_steps"] == passes - 2
        assert stats["collectives_last_pass"] >= 6  # two per bucket
        assert stats["bytes_sent"] < 0.8 * stats["bytes_uncompressed"]
        assert (
            rank["allreduce stats"]["bytes_sent"] == rank["allreduce stats"]["bytes_uncompressed"]
        )


class _Overflow(Model):
    """An infinite loss on rank 1 at step 4."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch).float()
        return (
            loss * float("inf")
            if self.trainer.global_rank == 1 and self.trainer.global_step == 4
            else loss
        )


def _grad_scaler(root: str) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    # `Trainer(precision="16-mixed")` becomes bf16-mixed on the CPU; given as a plugin it stays.
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    model = _Overflow()
    t = trainer(root, max_epochs=3, strategy=strategy(), plugins=[plugin])
    t.fit(model, data())
    hook = t.strategy.comm_hook
    return {
        "weights": weights(model),
        "stats": hook.stats(),
        "scale used": hook.state_dict("drop")["loss_scale"],
        "scale": scaler.get_scale(),
    }


def test_grad_scaler_skips_one_step_and_residuals_follow_the_scale(
    run_ranks: Any, tmp_path: Path
) -> None:
    ranks = run_ranks(_grad_scaler, str(tmp_path))
    assert_equal(ranks[0]["weights"], ranks[1]["weights"])
    assert all(bool(w.isfinite().all()) for w in ranks[0]["weights"].values())
    for rank in ranks:
        assert rank["stats"]["nonfinite_steps"] == 1
        assert rank["stats"]["backward_passes"] == 12
        assert rank["stats"]["step"] == 11
        # 1024, doubled after three good steps, halved by the overflow, doubled twice more.
        assert rank["scale used"] != 1024.0
        assert rank["scale used"] in (rank["scale"], rank["scale"] / 2)


class _NaN(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        bad = batch_idx == 1 and self.trainer.global_rank == 1
        return self.loss(batch) * (float("nan") if bad else 1.0)


class _SkipNonfinite(pl.Callback):  # of docs/ddp.md
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not torch.nn.utils.clip_grad_norm_(
            pl_module.parameters(), max_norm=float("inf")
        ).isfinite():
            optimizer.zero_grad()


def _one_nan(root: str) -> dict[str, Any]:
    def run(**options: Any) -> dict[str, Any]:
        with support.caught_warnings() as texts:
            t = trainer(root, strategy=strategy(hook="int8"), max_epochs=1, **options)
            model = _NaN()
            t.fit(model, data())
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        return {
            "finite": finite,
            "lines": [text for text in texts if "are not finite on rank 1 (" in text],
        }

    return {"ruined": run(), "skipped": run(callbacks=[_SkipNonfinite()])}


def test_a_nan_on_one_rank_is_named_and_a_callback_skips_the_step(
    run_ranks: Any, tmp_path: Path
) -> None:
    for rank, result in enumerate(run_ranks(_one_nan, str(tmp_path))):
        assert not result["ruined"]["finite"] and result["skipped"]["finite"]
        assert [len(outcome["lines"]) for outcome in result.values()] == [1 - rank, 1 - rank]


class _Stop(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 3


class _Endless(IterableDataset[Any]):
    """A data set without length."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((torch.ones(16), torch.ones(8)), 10)


def _endless() -> Any:
    return DataLoader(_Endless(), batch_size=4)


def _started(
    root: str,
    start: Any = None,
    make: Callable[[], Model] = Model,
    loader: Callable[[], Any] = data,
    **options: Any,
) -> dict[str, Any]:
    made = strategy(hook=PowerSGD(start_powerSGD_iter=start))
    t = trainer(root, strategy=made, **{"max_epochs": 2} | options)
    with support.caught_warnings() as texts:
        t.fit(make(), loader())
    stats = t.strategy.comm_hook.stats()
    return {
        "start": t.strategy.comm_hook.options["start_powerSGD_iter"],
        "steps": stats["step"],
        "warnings": [
            text
            for text in texts
            if any(part in text for part in ("has no effect", "compressed nothing"))
        ],
    }


FINDER = LearningRateFinder(num_training_steps=3)
FOR_EVER: dict[str, Any] = {"max_epochs": -1, "callbacks": [_Stop()]}


@pytest.mark.parametrize(
    ("arguments", "start", "steps", "warned"),
    [
        ({}, 1, 8, None),  # 10 % of the run
        ({"start": 0.5, "accumulate_grad_batches": 2}, 2, 4, None),
        ({"start": 0.5, "max_steps": 5}, 3, 5, None),
        (
            {"loader": _endless},
            100,
            6,
            "compressed nothing in 6 backward passes: it begins at step 100.",
        ),
        (FOR_EVER, 100, 3, "compressed nothing in 3 backward passes: it begins at step 100."),
        (
            {"make": support.TwoOptimizersModel},
            100,
            16,
            "compressed nothing in 16 backward passes: it begins at step",
        ),
        ({"start": 8, "fast_dev_run": 2}, 8, 2, None),
        (
            {"start": 8, "callbacks": [FINDER]},
            8,
            8,
            "begins at step 8, but this run ends at step 8,",
        ),
        ({"start": 7, "callbacks": [FINDER]}, 7, 8, None),
    ],
)
def test_compression_begins_at_the_start_step(
    run_ranks: Any,
    tmp_path: Path,
    arguments: dict[str, Any],
    start: int,
    steps: int,
    warned: str | None,
) -> None:
    for rank, result in enumerate(run_ranks(_started, str(tmp_path), **arguments)):
        assert (result["start"], result["steps"]) == (start, steps)
        if warned is None or rank != 0:
            assert result["warnings"] == []
        else:
            assert len(result["warnings"]) == 1 and warned in result["warnings"][0]


class _Interrupted(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise KeyboardInterrupt
        return self.loss(batch)


def _interrupted(root: str) -> list[str]:
    t = trainer(root, strategy=strategy(hook=PowerSGD(start_powerSGD_iter=7)))
    handler = signal.getsignal(signal.SIGINT)
    with support.caught_warnings() as texts:
        with pytest.raises(SystemExit):  # by Lightning
            t.fit(_Interrupted(), data())
        signal.signal(signal.SIGINT, handler)
    return [text for text in texts if "hook 'powerSGD'" in text]


def test_no_warning_after_an_interruption(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_interrupted, str(tmp_path)) == [[], []]


def _second_fit(root: str, start: float) -> dict[str, Any]:
    t = trainer(root, strategy=strategy(hook=PowerSGD(start_powerSGD_iter=start)), max_epochs=1)
    model = Model()
    t.fit(model, data())
    t.fit_loop.max_epochs = 3
    with support.caught_warnings() as texts:
        t.fit(model, data())
    hook = t.strategy.comm_hook
    warned = [
        text
        for text in texts
        if any(part in text for part in ("has no effect", "compressed nothing"))
    ]
    return {"start": hook.options["start_powerSGD_iter"], "stats": hook.stats(), "warnings": warned}


def test_a_second_fit_counts_its_own_steps(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_second_fit, str(tmp_path), 0.5):
        assert rank["start"] == 4  # half of the 8 steps that are left of 12
        assert rank["stats"]["compressed_steps"] == 4
    (warning,) = run_ranks(_second_fit, str(tmp_path), 9)[0]["warnings"]
    assert "begins at step 9, but this run ends at step 8," in warning


@pytest.mark.parametrize(
    "arguments", [{"loader": _endless}, {"make": support.ManualModel, "max_steps": 8}]
)
def test_a_fraction_of_an_unknown_length_is_an_error(
    run_ranks: Any, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(
        AssertionError,
        match="start_powerSGD_iter=0.5 is a fraction of the run, whose length the Trainer",
    ):
        run_ranks(_started, str(tmp_path), start=0.5, **arguments)


class _Finetuned(Model):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(16, 16)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.backbone(batch[0]), batch[1]))


def _finetune(root: str) -> dict[str, Any]:
    """Train the backbone from the second of four epochs on, and resume for the last two."""

    def run(**options: Any) -> dict[str, Any]:
        # A new learning rate of its own at each start, so that the backbone really moves.
        unfreezer = BackboneFinetuning(
            unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, verbose=False
        )
        return fit(root, epochs=4, model=_Finetuned(), callbacks=[unfreezer], **options)

    return {"whole": run(save=True), "resumed": run(ckpt_path=path_at(root, SAVED_AT))}


def test_parameters_unfrozen_after_the_wrap_are_named_once(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_finetune, str(tmp_path))
    (warning,) = (text for text in first["whole"]["warnings"] if "backbone" in text)
    assert (
        "2 parameters (the first is backbone.weight) were frozen or missing when the hook was"
        " attached" in warning
    )
    assert not [text for text in second["whole"]["warnings"] if "backbone" in text]
    # What the warning says is so: DDP averages the rest and not the backbone.
    one = first["whole"]["final"]
    other = second["whole"]["final"]
    for name in one:
        assert torch.equal(one[name], other[name]) == (not name.startswith("backbone.")), name
    # The checkpoint is of the parameters that DDP reduces, then as now: it loads without a word,
    # and strictly.
    assert not any(
        name.startswith("backbone.") for name in first["whole"]["hook state"]["parameters"]
    )
    for rank in (first, second):
        assert rank["resumed"]["start"] == [SAVED_AT]
        assert not [text for text in rank["resumed"]["warnings"] if "saved" in text]
