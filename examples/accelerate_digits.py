"""Trains a small convolutional network on scikit-learn's digits, on two CPU processes that send
compressed gradients.

    accelerate-commhooks launch --config_file examples/accelerate_config.yaml
    examples/accelerate_digits.py

The line to copy is the one with `CommHookKwargs`; the rest is an ordinary Accelerate script. The
YAML file selects the hook. Run again with the same `--folder`, also after a crash, the script
resumes from the last checkpoint, including the learned state of the hook.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed, tqdm
from digits import digits, digits_net
from torch import nn
from torch.utils.data import DataLoader

from accelerate_commhooks import CommHookKwargs

# ---- checkpoints ---------------------------------------------------------------------------------


def newest_checkpoint(folder: Path) -> Path | None:
    """The latest complete checkpoint; incomplete ones have another name (see `save`)."""
    complete = [path for path in folder.glob("epoch_*") if path.name[6:].isdigit()]
    return max(complete, key=lambda path: int(path.name[6:]), default=None)


def save(accelerator: Accelerator, folder: Path, epoch: int) -> None:
    """Save on all ranks into a temporary folder. It is renamed when all ranks are done; then the
    previous checkpoint is deleted.
    """
    unfinished = folder / "unfinished"
    before = newest_checkpoint(folder)
    if accelerator.is_main_process and unfinished.exists():
        shutil.rmtree(unfinished)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(folder / f"epoch_{epoch}")
        if before is not None:
            shutil.rmtree(before)
    accelerator.wait_for_everyone()


# ---- training ------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("digits"),
        help="for checkpoints, the log and result.json",
    )
    return parser


def main() -> None:
    args = arguments().parse_args()
    set_seed(args.seed)
    handler = CommHookKwargs()
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[handler],
        # Restores the order of batches from a checkpoint.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    if accelerator.num_processes != 2:
        raise SystemExit(
            "accelerate_digits.py is for 2 processes, and Accelerate has started"
            f" {accelerator.num_processes} ({accelerator.distributed_type}); use --config_file"
            " examples/accelerate_config.yaml. With `--cpu --num_processes 2` Accelerate starts"
            " one, and one process has no gradients to send."
        )
    train, test = digits()
    model = digits_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_loader = DataLoader(train, batch_size=32, shuffle=True)
    test_loader = DataLoader(test, batch_size=180)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    args.folder.mkdir(parents=True, exist_ok=True)
    first_epoch = 0
    checkpoint = newest_checkpoint(args.folder)
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        first_epoch = int(checkpoint.name[6:])
        accelerator.print(f"going on after epoch {first_epoch}")

    steps = len(train_loader)
    log = open(args.folder / "log.csv", "a", buffering=1) if accelerator.is_main_process else None
    bar = tqdm(total=args.epochs * steps, initial=first_epoch * steps, unit="step")
    for epoch in range(first_epoch, args.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        for number, (images, labels) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            bar.update()
            bar.set_postfix(epoch=epoch + 1, loss=f"{loss.item():.3f}", refresh=False)
            if log is not None:
                log.write(f"{epoch},{epoch * steps + number},{loss.item()}\n")
        save(accelerator, args.folder, epoch + 1)
    bar.close()

    model.eval()
    with torch.no_grad():
        right = [model(images).argmax(dim=1) == labels for images, labels in test_loader]
    accuracy = accelerator.gather_for_metrics(torch.cat(right)).float().mean().item()
    accelerator.print(f"test accuracy {accuracy:.2%}, {handler.attached.stats()}")
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), args.folder / "weights.pt")
        result = {
            "test_accuracy": accuracy,
            "global_step": args.epochs * steps,
            "stats": handler.attached.stats(),
        }
        (args.folder / "result.json").write_text(json.dumps(result, indent=2))
    accelerator.wait_for_everyone()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Accelerate, DDP and gloo sometimes abort at interpreter shutdown, with or without a hook: exit
    # here.
    sys.stdout.flush()
    os._exit(0)
