"""Trains a small network with Fabric on two CPU processes that send compressed gradients.

    python examples/fabric_training.py

The line to copy is the one with `CommHookDDP`. Run again, the script resumes from `fabric.ckpt`,
with the hook.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from lightning_commhooks.fabric import CommHookDDP


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--hook", default="powerSGD", help="name of the hook; 'commhooks hooks' lists them"
    )
    parser.add_argument("--epochs", type=int, default=5, help="epochs of this run")
    parser.add_argument("--checkpoint", type=Path, default=Path("fabric.ckpt"))
    args = parser.parse_args()

    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=CommHookDDP(hook=args.hook, total_steps=16 * args.epochs),
    )
    fabric.launch()
    fabric.seed_everything(0)

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    model, optimizer = fabric.setup(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    inputs = torch.randn(1024, 64)
    batches = fabric.setup_dataloaders(
        DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=32)
    )

    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if args.checkpoint.exists():
        fabric.load(args.checkpoint, state)
    for epoch in range(state["epoch"], state["epoch"] + args.epochs):
        for x, y in batches:
            loss = torch.nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")
    state["epoch"] = epoch + 1
    fabric.save(args.checkpoint, state)

    stats = fabric.strategy.comm_hook.stats()
    fabric.print(f"step {stats['step']}, {stats['compression_rate']:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
