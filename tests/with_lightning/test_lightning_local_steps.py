"""Local steps in a Trainer resume, validate the common weights, and end the last round."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_lightning_fsdp2 import Sharded
from test_lightning_fsdp2 import fit as fit_sharded
from test_lightning_fsdp2 import strategy as sharded
from torch.distributed.tensor import DTensor

import commhooks
from tests.support.features import fully_shard_on_gloo
from tests.support.lightning_support import (
    SAVED_AT,
    Model,
    assert_equal,
    data,
    difference,
    fit,
    path_at,
    strategy,
    trainer,
    weights,
)

EVERY = (
    5  # so that checkpoints, ends of epochs and validations, after 4 or 8 steps, are in mid-round
)
HOOK = commhooks.DiLoCo(sync_every=EVERY, outer_momentum=0.3)


class _Looks(pl.Callback):
    """Keeps copies of the weights at the end of the first epoch, before a validation begins, and
    when the module's own `on_train_end` is called.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.seen = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            self.seen["own"] = weights(module)
            trainer.save_checkpoint(f"{self.root}/model.ckpt", weights_only=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # the first, in mid-round and without a validation
        self.seen.setdefault("epoch", weights(module))

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen["validated"] = weights(module)


class _LooksAtTheEnd(Model):
    def on_train_end(self) -> None:
        self.seen["end"] = weights(self)


def _look(root: str) -> dict[str, Any]:
    model = _LooksAtTheEnd()
    looks = _Looks(root)
    model.seen = looks.seen
    settings = {
        "max_epochs": 2,
        "limit_val_batches": 1,
        "check_val_every_n_epoch": 2,
        "callbacks": [looks],
    }
    made = trainer(root, strategy=strategy(hook=HOOK), **settings)
    made.fit(model, data(), data())
    looks.seen["saved"] = torch.load(f"{root}/model.ckpt", weights_only=True)["state_dict"]
    return looks.seen


def test_whoever_looks_at_the_model_sees_the_common_one(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_look, str(tmp_path))
    assert difference(first["own"], second["own"]) > 1e-5
    for where in ("epoch", "validated", "end"):
        assert_equal(first[where], second[where])
    # The average of two ranks, sent in blocks of 4 bits, is near neither of them.
    assert difference(first["saved"], first["own"]) > 1e-5


def _late(root: str) -> list[str]:
    hook = commhooks.DiLoCo(sync_every=EVERY, start_iter=SAVED_AT + 2)
    fit(root, save=True, hook=hook)
    return fit(root, ckpt_path=path_at(root, SAVED_AT), hook=hook)["warnings"]


def test_a_resume_that_still_reaches_the_start_is_not_warned_about(
    run_ranks: Any, tmp_path: Path
) -> None:
    """It counts steps of the training, not rounds, of which there is none yet."""
    assert run_ranks(_late, str(tmp_path)) == [[], []]


def local_values(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = parameter.detach()
    return local.to_local() if isinstance(local, DTensor) else local


def _sharded(root: str) -> dict[str, Any]:
    hook = commhooks.DiLoCo(sync_every=3)  # an epoch has four steps, and a checkpoint at its end
    through = fit_sharded(f"{root}/through", 2, hook=hook)
    resumed = fit_sharded(f"{root}/resumed", 2, f"{root}/through/epoch=0.ckpt", hook=hook)
    return {"through": through, "resumed": resumed}


@fully_shard_on_gloo
def test_a_sharded_fit_resumes_in_mid_round(run_ranks: Any, tmp_path: Path) -> None:
    results = run_ranks(_sharded, str(tmp_path), timeout_s=100)
    for result in results:
        assert_equal(result["resumed"]["weights"], result["through"]["weights"])
        assert_equal(result["through"]["weights"], results[0]["through"]["weights"])
        assert result["through"]["stats"]["step"] == 4  # after steps 3, 4, 7 and 8


class _Swaps(pl.Callback):
    """Puts an average over time into the model for each validation, as an EMA callback does, and
    looks at the model at the end of an epoch.
    """

    def __init__(self) -> None:
        self.average: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        weights = [local_values(p).clone() for p in module.parameters()]
        self.average = (
            [0.9 * a + 0.1 * o for a, o in zip(self.average, weights, strict=True)]
            if self.average
            else weights
        )

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.seen["epoch"] = [local_values(p).clone() for p in module.parameters()]

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trained = [local_values(p).clone() for p in module.parameters()]
        for p, value in zip(module.parameters(), self.average or self.trained, strict=True):
            local_values(p).copy_(value)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for p, value in zip(module.parameters(), self.trained, strict=True):
            local_values(p).copy_(value)
        self.seen["after"] = [local_values(p).clone() for p in module.parameters()]


def _swap(root: str, is_sharded: bool) -> dict[str, Any]:
    swaps = _Swaps()
    made = sharded(hook=HOOK) if is_sharded else strategy(hook=HOOK)
    made = trainer(root, strategy=made, max_epochs=1, limit_val_batches=1, callbacks=[swaps])
    made.fit(Sharded() if is_sharded else Model(), data(), data())
    return swaps.seen


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, marks=fully_shard_on_gloo)])
def test_an_average_in_the_model_leaves_the_replicas_equal(
    run_ranks: Any, tmp_path: Path, is_sharded: bool
) -> None:
    first, second = run_ranks(_swap, str(tmp_path), is_sharded)
    for when in ("epoch", "after"):
        assert all(map(torch.equal, first[when], second[when])), when
