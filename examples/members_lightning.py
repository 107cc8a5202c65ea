"""Trains a small convolutional network on scikit-learn's digits with Lightning, on machines that
come and go.

    commhooks lighthouse  # prints the variable to set in two other terminals, or machines
    TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/members_lightning.py --name a
    TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/members_lightning.py --name b

Kill one of them: the other goes on after a few seconds. Start it again: it takes the state of the
other, and trains with it from the next outer step on. The line to copy is the one with
`CommHookDDP`; the rest is an ordinary Lightning script, which each machine starts for itself.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from digits import digits, digits_net
from torch import nn
from torch.utils.data import DataLoader

import commhooks
from lightning_commhooks import CommHookDDP, CommHookMonitor


class DigitsNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = digits_net()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        accuracy = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("test_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.002)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--name", help="of this machine, different on each; by default the host name"
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument(
        "--folder", type=Path, default=Path("members"), help="for checkpoints and logs"
    )
    return parser


def main() -> None:
    args = arguments().parse_args()
    torch.set_num_threads(1)  # several machines on one host
    train, test = digits()  # each machine shuffles with a seed of its own
    members = commhooks.Torchft(name=args.name, timeout_s=30)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=CommHookDDP(hook="diloco", hook_options={"sync_every": 20}, members=members),
        max_steps=args.steps,
        max_epochs=-1,
        callbacks=[CommHookMonitor(progress_bar="members")],
        default_root_dir=args.folder / (args.name or "machine"),
    )
    model = DigitsNet()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True))
    stats = trainer.strategy.comm_hook.stats()
    trainer.test(model, DataLoader(test, batch_size=180))
    print(f"{stats['step']} rounds, the last one with {stats['members']} machine(s)")


if __name__ == "__main__":
    main()
