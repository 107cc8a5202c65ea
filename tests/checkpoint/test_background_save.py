"""A checkpoint that is written while training goes on holds what a checkpoint written at once would hold."""

import os
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from commhooks import PowerSGD
from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from tests.support.lightning_support import STEPS_PER_EPOCH, Model, data, strategy, trainer
from tests.support.models import same

HOOK = PowerSGD(start_powerSGD_iter=2, matrix_approximation_rank=2)
STEPS_LATER = 3


class _Late(TorchCheckpointIO):
    """Writes nothing before it is told."""

    def __init__(self) -> None:
        self.now = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.now.wait(30)
        super().save_checkpoint(*args, **kwargs)


class _Tells(pl.Callback):
    """When training has gone on for some steps."""

    def __init__(self, late: _Late) -> None:
        self.late = late

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS_PER_EPOCH + STEPS_LATER:
            self.late.now.set()


def _saved(root: str) -> None:
    for name in ("late", "at once"):
        folder, late = os.path.join(root, name), _Late()
        in_background = name == "late"
        t = trainer(
            folder,
            strategy=strategy(hook=HOOK, save_residual="per_rank"),
            max_epochs=2,
            callbacks=[
                ModelCheckpoint(folder, filename="{step}", save_top_k=-1),
                *([_Tells(late)] if in_background else []),
            ],
            plugins=[AsyncCheckpointIO(late)] if in_background else [],
        )
        t.fit(Model(), data())


def test_the_state_of_the_moment_of_saving(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_saved, str(tmp_path))
    late, at_once = (
        torch.load(tmp_path / name / f"step={STEPS_PER_EPOCH}.ckpt", weights_only=True) for name in ("late", "at once")
    )
    assert late[CHECKPOINT_KEY]["step"] == late["global_step"] == STEPS_PER_EPOCH
    assert torch.stack(late[CHECKPOINT_KEY]["parameters"]["net.2.weight"]["residual"]).norm() > 0
    for key in (CHECKPOINT_KEY, "state_dict", "optimizer_states"):
        assert same(late[key], at_once[key]), key
    last = torch.load(tmp_path / "late" / f"step={2 * STEPS_PER_EPOCH}.ckpt", weights_only=True)
    assert not same(late[CHECKPOINT_KEY]["parameters"], last[CHECKPOINT_KEY]["parameters"])  # it does go on
