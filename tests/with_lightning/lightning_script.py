"""A user's training script, for the launchers: python lightning_script.py START_METHOD FOLDER

Two CPU processes of Lightning's own making. Every rank writes what came of it to
FOLDER/rank-N.json.
"""

import hashlib
import json
import os
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from commhooks import PowerSGD
from lightning_commhooks import CommHookDDP, hook_stats


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Report(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters())
        report = {
            "world_size": trainer.world_size,
            "pid": os.getpid(),
            "weights": hashlib.sha256(weights).hexdigest(),
            "stats": trainer.strategy.comm_hook.stats(),
        }
        with open(os.path.join(self.folder, f"rank-{trainer.global_rank}.json"), "w") as file:
            json.dump(report, file)


def main(start_method: str, folder: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 16, generator=generator), torch.randn(64, 8, generator=generator)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CommHookDDP(
            PowerSGD(start_powerSGD_iter=2), start_method=start_method, bucket_cap_mb=0.0005
        ),
        max_epochs=2,
        callbacks=[Report(folder)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(x, y), batch_size=8))
    stats = hook_stats(trainer)
    assert stats is not None and stats["step"] == 8 and stats["compressed_steps"] > 0
    if start_method == "popen":
        assert trainer.strategy.comm_hook is not None
    else:
        assert trainer.strategy.comm_hook is None  # it lived in the workers


if __name__ == "__main__":
    main(*sys.argv[1:])
