"""Plain DDP under torchrun: saves every ten steps, and goes on after a restart, with any number of
ranks.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic_training.py state.pt

Elastic, with one or two machines (or terminals); one may leave and come back while the other
trains:

    torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint
        HOST:29400 \\ --rdzv-id run examples/elastic_training.py state.pt

PAUSE_S=0.5 in the environment makes each step last that long, so that there is time to kill
something.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks

STEPS, SAVE_EVERY = 60, 10


def main(path: Path, pause_s: float) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=5)
    hook = commhooks.attach(model, config, save_residual="mean")
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        hook.load_state_dict(saved["hook"])
        first = saved["step"]
    world = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    print(f"{world}: begins at step {first}, hook at {hook.stats()['step']}", flush=True)
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(16, 64, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            state = hook.state_dict()  # on all ranks, because it is the mean of their residuals
            if dist.get_rank() == 0:
                everything = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                torch.save({**everything, "hook": state, "step": step + 1}, f"{path}.new")
                os.replace(f"{path}.new", path)  # whole, or not at all
        time.sleep(pause_s)
    print(f"{world}: ends at step {STEPS}, hook at {hook.stats()['step']}", flush=True)
    dist.destroy_process_group()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="written by rank 0, read by all")
    return parser


if __name__ == "__main__":
    main(arguments().parse_args().checkpoint, float(os.environ.get("PAUSE_S", "0")))
