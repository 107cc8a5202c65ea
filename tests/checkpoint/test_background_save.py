"""A checkpoint that is written while training goes on holds the state of the moment of saving."""

import copy
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from commhooks import PowerSGD
from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from tests.support.lightning_support import Model, data, strategy, trainer
from tests.support.models import same

HOOK = PowerSGD(start_powerSGD_iter=1, matrix_approximation_rank=2)
SAVE_AT, STEPS = 3, 5


class _Late(TorchCheckpointIO):
    """Writes nothing before it is told."""

    def __init__(self) -> None:
        self.now = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.now.wait(30)
        super().save_checkpoint(*args, **kwargs)


class _Noted(AsyncCheckpointIO):
    """Keeps a copy of what there is to save at the moment of saving."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.copy = copy.deepcopy(checkpoint)
        super().save_checkpoint(checkpoint, *args, **kwargs)


class _GoesOn(pl.Callback):
    """Lets the checkpoint be written at the end of the training."""

    def __init__(self, late: _Late) -> None:
        self.late = late

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS:
            self.late.now.set()


def _saved(root: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What there was at the moment of saving on rank 0, and the hook's state at the end."""
    late = _Late()
    noted = _Noted(late)
    t = trainer(
        root,
        strategy=strategy(hook=HOOK, save_residual="per_rank"),
        max_steps=STEPS,
        callbacks=[ModelCheckpoint(root, filename="late", every_n_train_steps=SAVE_AT), _GoesOn(late)],
        plugins=[noted],
    )
    t.fit(Model(), data())
    last = t.strategy.comm_hook.state_dict("per_rank")
    return (noted.copy, last) if t.is_global_zero else None


def test_the_state_of_the_moment_of_saving(run_ranks: Any, tmp_path: Path) -> None:
    then, last = run_ranks(_saved, str(tmp_path))[0]
    late = torch.load(tmp_path / "late.ckpt", weights_only=True)
    assert late[CHECKPOINT_KEY]["step"] == late["global_step"] == SAVE_AT
    assert torch.stack(late[CHECKPOINT_KEY]["parameters"]["net.2.weight"]["residual"]).norm() > 0
    for key in (CHECKPOINT_KEY, "state_dict", "optimizer_states"):
        assert same(late[key], then[key]), key
    assert not same(late[CHECKPOINT_KEY]["parameters"], last["parameters"])  # it does go on
