"""Multi-node FSDP on a slow network, in small: four CPU processes that stand for two machines of
two GPUs.

    torchrun --standalone --nproc-per-node 4 examples/accelerate_fsdp2.py

Each machine holds one replica of the model, sharded over its GPUs by FSDP2 of Accelerate. Between
the machines only gradients travel, and the hook compresses them. The lines to copy are marked. Run
again with the same `--folder`, also after a crash, it goes on from the last checkpoint, with what
the hook has learned.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    PartialState,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import set_seed
from accelerate_digits import newest_checkpoint, save
from digits import digits, digits_net
from torch import nn
from torch.utils.data import DataLoader

from accelerate_commhooks import CommHookKwargs


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--hook", default="powerSGD", help='"none" averages uncompressed, for comparison'
    )
    parser.add_argument("--replicas", type=int, default=2, help="machines")
    parser.add_argument(
        "--folder", type=Path, default=Path("digits-fsdp2"), help="for checkpoints and result.json"
    )
    return parser


def main() -> None:
    args = arguments().parse_args()
    set_seed(0)
    if not torch.cuda.is_available():
        # Accelerate 1.15 shards on accelerators only. On CPUs, for a trial like this one, pretend
        # to have some.
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    options = {} if args.hook == "none" else {"total_steps": args.epochs * 12}
    handler = CommHookKwargs(hook=args.hook, **options)  # <--
    world_size = int(os.environ["WORLD_SIZE"])
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10_000
        ),
        parallelism_config=ParallelismConfig(
            dp_replicate_size=args.replicas,  # <-- a replica on each machine ...
            dp_shard_size=world_size // args.replicas,  # ... sharded over its GPUs
        ),
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True
        ),  # restores the order of batches
    )
    handler.attach(accelerator)  # <-- before prepare
    train, test = digits()
    model = digits_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    train_loader = DataLoader(train, batch_size=32, shuffle=True)
    test_loader = DataLoader(test, batch_size=90)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    args.folder.mkdir(parents=True, exist_ok=True)
    first_epoch = 0
    checkpoint = newest_checkpoint(args.folder)
    accelerator.wait_for_everyone()
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        first_epoch = int(checkpoint.name[6:])
        accelerator.print(f"going on after epoch {first_epoch}")
    for epoch in range(first_epoch, args.epochs):
        model.train()
        train_loader.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        save(accelerator, args.folder, epoch + 1)
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        right = [model(images).argmax(dim=1) == labels for images, labels in test_loader]
    accuracy = accelerator.gather_for_metrics(torch.cat(right)).float().mean().item()
    stats = None if handler.attached is None else handler.attached.stats()
    accelerator.print(f"test accuracy {accuracy:.2%}, {stats}")
    if accelerator.is_main_process:
        result = {"test_accuracy": accuracy, "stats": stats}
        (args.folder / "result.json").write_text(json.dumps(result, indent=2))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    # Accelerate and gloo sometimes abort at interpreter shutdown, with or without a hook: exit
    # here.
    sys.stdout.flush()
    os._exit(0)
