"""A fit with CommHookDDP that may save or resume, and what came of it; for the tests of checkpoints."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from commhooks import PowerSGD
from tests.support import lightning_support as support
from tests.support.lightning_support import (
    STEPS_PER_EPOCH,
    Model,
    PoolEnvironment,
    Watch,
    data,
    strategy,
    trainer,
    weights,
)

# Compressing from the second epoch on; checkpoints at the end of the second, so that residuals are in them.
HOOK = PowerSGD(start_powerSGD_iter=STEPS_PER_EPOCH, matrix_approximation_rank=2)
SAVED_AT = 2 * STEPS_PER_EPOCH


def keeper(root: str, **options: Any) -> ModelCheckpoint:
    """A checkpoint after every second epoch: `root/step=N.ckpt`."""
    return ModelCheckpoint(root, filename="{step}", save_top_k=-1, every_n_epochs=2, **options)


def path_at(root: str | Path, step: int) -> str:
    return os.path.join(str(root), f"step={step}.ckpt")


def fit(
    root: str,
    *,
    ckpt_path: str | None = None,
    seed: int = 0,
    save: bool = False,
    epochs: int = 4,
    callbacks: Any = (),
    model: Model | None = None,
    make: Any = None,
    **strategy_options: Any,
) -> dict[str, Any]:
    """One Trainer, strategy and model from new; what came of it on this rank."""
    watch = Watch()
    model = model or Model(seed=seed)
    strategy_options.setdefault("hook", HOOK)
    made = make() if make is not None else strategy(**strategy_options)
    t = trainer(
        root,
        strategy=made,
        max_epochs=epochs,
        callbacks=[watch, *callbacks, *([keeper(root)] if save else [])],
    )
    with support.caught_warnings() as texts:
        t.fit(model, data(), ckpt_path=ckpt_path)
    hook = getattr(t.strategy, "comm_hook", None)
    return {
        "weights": watch.weights,
        "start": watch.start_steps,
        "final": weights(model),
        "stats": hook.stats() if hook is not None else None,
        "hook state": hook.state_dict("per_rank") if hook is not None else None,
        "warnings": about_hooks(texts),
    }


def about_hooks(texts: list[str]) -> list[str]:
    return [text for text in texts if "hook" in text.lower() or "residual" in text]


def residuals(payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Name -> residual, of a payload of this rank."""
    return {
        name: entry["residual"][0] if isinstance(entry["residual"], list) else entry["residual"]
        for name, entry in payload["parameters"].items()
        if entry["residual"] is not None
    }


class Slurm(PoolEnvironment, SLURMEnvironment):
    """Lightning's own requeueing signal handler on the ranks of the pool."""
