"""Trains a small convolutional network on scikit-learn's digits, on two CPU processes that send
compressed gradients.

    python examples/lightning_digits.py
    python examples/lightning_digits.py --hook powerSGD --hook-options
    '{"matrix_approximation_rank": 4}' --mbit 20

The line to copy is the one with `CommHookDDP`; the rest is an ordinary Lightning script. Run again
with the same `--folder`, also after a crash, the script resumes from the last checkpoint, including
the learned state of the hook.
"""

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from digits import digits, digits_net
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from slow_link import SlowLink
from torch import nn
from torch.utils.data import DataLoader

from lightning_commhooks import CommHookDDP


class DigitsNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = digits_net()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        answers = self.layers(images)
        self.log("test_loss", nn.functional.cross_entropy(answers, labels), sync_dist=True)
        self.log("test_accuracy", (answers.argmax(dim=1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--hook", default="powerSGD", help="name of the hook; 'commhooks hooks' lists them"
    )
    parser.add_argument("--hook-options", type=json.loads, help="options of the hook, as JSON")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mbit", type=float, help="slow their connection down to so many Mbit/s (Linux)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("digits"), help="for checkpoints, logs and result.json"
    )
    return parser


def main() -> None:
    args = arguments().parse_args()
    pl.seed_everything(args.seed, workers=True)
    train, test = digits()
    model = DigitsNet()
    timer = Timer()
    slow_link = [SlowLink(args.mbit)] if args.mbit else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        # Small buckets, so that this small network has several of them like a large one.
        strategy=CommHookDDP(hook=args.hook, hook_options=args.hook_options, bucket_cap_mb=0.25),
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(dirpath=args.folder, save_last=True), timer, *slow_link],
        logger=CSVLogger(args.folder, name="log", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
    )
    # "last": the newest checkpoint in the folder; training starts afresh if there is none.
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), ckpt_path="last")
    [metrics] = trainer.test(model, DataLoader(test, batch_size=180))

    if trainer.is_global_zero:
        result = {
            **metrics,
            "global_step": trainer.global_step,
            "slow_connections": slow_link[0].connections if slow_link else 0,
            "seconds": timer.time_elapsed("train"),
            "stats": trainer.strategy.comm_hook.stats(),
        }
        (args.folder / "result.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
