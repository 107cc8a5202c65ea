"""A Lightning Trainer inside the worker pool, and helpers for the Lightning tests.

The pool has joined a process group before the function runs, and Lightning uses an existing group:
no launcher, no ports. All functions here run in a worker.
"""

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from commhooks import PowerSGD
from lightning_commhooks import CommHookDDP
from tests.support.ddp_steps import log_lines

SEVERAL_BUCKETS_MB = 0.0005  # the model below then has three buckets after DDP's rebuild
STEPS_PER_EPOCH = 4  # for two ranks


class PoolEnvironment(ClusterEnvironment):
    creates_processes_externally = True  # type: ignore[assignment]
    main_address = "unused"  # type: ignore[assignment]
    main_port = 0  # type: ignore[assignment]

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Model(pl.LightningModule):
    """Has three matrices that are worth compressing, and biases, without any noise."""

    def __init__(self, seed: int = 0, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32),
            torch.nn.Tanh(),
            torch.nn.Linear(32, 32),
            torch.nn.Tanh(),
            torch.nn.Linear(32, 8),
        )
        self.extra = torch.nn.Linear(8, 8) if extra else torch.nn.Identity()
        self.lr = 0.05  # which a learning-rate finder sets

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.extra(self.net(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.9)


class ManualModel(Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class TwoOptimizersModel(ManualModel):
    """Steps an optimizer of the first layers and one of the last in turn."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        head = list(self.net[4].parameters())
        body = [p for p in self.net.parameters() if all(p is not q for q in head)]
        return [torch.optim.SGD(body, lr=self.lr), torch.optim.Adam(head, lr=0.01)]


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 16, generator=generator)
    y = torch.tanh(x @ torch.randn(16, 8, generator=generator)) + 0.1 * torch.randn(
        64, 8, generator=generator
    )
    return DataLoader(TensorDataset(x, y), batch_size=8)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return data()


def cli_config(
    path: Path, strategy: str, *, devices: int = 2, epochs: int = 2, **init_args: Any
) -> str:
    """Write a LightningCLI configuration for a class of `lightning_commhooks`; return its path."""
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    options = dict.fromkeys(quiet, False) | {
        "accelerator": "cpu",
        "devices": devices,
        "max_epochs": epochs,
    }
    options["strategy"] = {"class_path": f"lightning_commhooks.{strategy}", "init_args": init_args}
    path.write_text(json.dumps({"trainer": options}))
    return str(path)


def strategy(**options: Any) -> CommHookDDP:
    """Return a strategy, by default with PowerSGD from step 2 on and several buckets."""
    options.setdefault("hook", PowerSGD(start_powerSGD_iter=2))
    options.setdefault("bucket_cap_mb", SEVERAL_BUCKETS_MB)
    return CommHookDDP(**options)


def trainer(
    root: str, *, pool: bool = True, made_by: Any = pl.Trainer, **options: Any
) -> pl.Trainer:
    """Return a quiet Trainer on the ranks of the pool. It saves checkpoints only with a callback
    for them.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options.setdefault("strategy", None)
    if options["strategy"] is None:
        options["strategy"] = strategy()
    callbacks = options.get("callbacks") or []
    options.setdefault(
        "enable_checkpointing", any(isinstance(callback, Checkpoint) for callback in callbacks)
    )
    return made_by(
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[*([PoolEnvironment()] if pool else []), *options.pop("plugins", [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=root,
        **options,
    )


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class Watch(pl.Callback):
    """Records the hook's step when training starts."""

    def __init__(self) -> None:
        self.start_steps: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        hook = getattr(trainer.strategy, "comm_hook", None)
        self.start_steps.append(hook.stats()["step"] if hook is not None else -1)


@contextlib.contextmanager
def caught_warnings() -> Iterator[list[str]]:
    """Context manager: collect the texts of all warnings, those that commhooks logs first."""
    with log_lines(level=logging.WARNING) as texts, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(warning.message) for warning in caught]


# ---- a fit that may save or resume ---------------------------------------------------------------

# Compressing from the second epoch on; checkpoints at the end of the second, so that residuals are
# in them.
HOOK = PowerSGD(start_powerSGD_iter=STEPS_PER_EPOCH, matrix_approximation_rank=2)
SAVED_AT = 2 * STEPS_PER_EPOCH


def keeper(root: str, **options: Any) -> ModelCheckpoint:
    """Make a callback that saves a checkpoint after every second epoch: `root/step=N.ckpt`."""
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
    """Fit with a new Trainer, strategy and model, and return the outcome on this rank."""
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
    with caught_warnings() as texts:
        t.fit(model, data(), ckpt_path=ckpt_path)
    hook = getattr(t.strategy, "comm_hook", None)
    return {
        "start": watch.start_steps,
        "final": weights(model),
        "stats": hook.stats() if hook is not None else None,
        "hook state": hook.state_dict("per_rank") if hook is not None else None,
        "warnings": about_hooks(texts),
    }


def about_hooks(texts: list[str]) -> list[str]:
    return [text for text in texts if "hook" in text.lower() or "residual" in text]


def residuals(payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return name -> residual for a payload of this rank."""
    return {
        name: entry["residual"][0] if isinstance(entry["residual"], list) else entry["residual"]
        for name, entry in payload["parameters"].items()
        if entry["residual"] is not None
    }


# ---- in the parent process -----------------------------------------------------------------------


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert the same names and the same bits."""
    assert a.keys() == b.keys() and a
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"not bit-equal: {different}, by up to {difference(a, b)}"


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys() and a
    return max(float((a[name] - b[name]).abs().max()) for name in a)
