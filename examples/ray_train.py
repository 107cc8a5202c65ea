"""Ray Train with a communication hook: two CPU workers, a checkpoint per epoch with the hook's
state, a resume from it.

    pip install "ray[train]" ".[lightning]"
    python examples/ray_train.py /tmp/ray-results

The same command goes on where the last run has ended.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray
import ray.train
import torch
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_commhooks import CommHookDDP

EPOCHS_PER_RUN = 2


class RayCommHookDDP(CommHookDDP, RayDDPStrategy):
    """The hook from the first, what Ray wants from the second."""


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Report(pl.Callback):
    """Gives Ray the checkpoint of each epoch. All ranks must save, because the mean of the
    residuals is in it.
    """

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        hook = trainer.strategy.comm_hook.stats()
        metrics = {
            "epoch": trainer.current_epoch,
            "hook_step": hook["step"],
            "compressed": hook["compressed_steps"],
        }
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, "model.ckpt"))  # rank 0 writes
            checkpoint = (
                ray.train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
            )
            ray.train.report(metrics, checkpoint=checkpoint)


def train_on_each_worker(config: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 64, generator=generator), torch.randn(64, 8, generator=generator)
    )
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 4}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=RayCommHookDDP(hook="powerSGD", hook_options=options),
        plugins=[RayLightningEnvironment()],
        callbacks=[Report()],
        max_epochs=config["epochs"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    with contextlib.ExitStack() as stack:
        last = ray.train.get_checkpoint()
        folder = stack.enter_context(last.as_directory()) if last is not None else None
        trainer.fit(
            Model(),
            DataLoader(data, batch_size=8),
            ckpt_path=f"{folder}/model.ckpt" if folder else None,
        )


def main(storage: str) -> None:
    """Train for some epochs more than the last run with this folder."""
    done = Path(storage, "epochs")
    epochs = EPOCHS_PER_RUN + (int(done.read_text()) if done.exists() else 0)
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train_on_each_worker,
        train_loop_config={"epochs": epochs},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="commhooks", storage_path=storage),
    )
    result = trainer.fit()
    done.write_text(str(epochs))
    print(json.dumps(result.metrics))
    ray.shutdown()


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
