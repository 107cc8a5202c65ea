"""A training script as users write it, started with `accelerate launch` by test_accelerate_launch.py.

    accelerate_script.py FOLDER through     trains twice, with the hook and without, and saves after each of SAVE_AT
    accelerate_script.py FOLDER resume      in new processes: resumes from each of these and trains to the end

Batches in random order, two of them accumulated per step, a scheduler, several buckets. What each rank has seen is
written to FOLDER.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from training import SEVERAL_BUCKETS_MB, flat, make_model, residuals

from accelerate_commhooks import CommHookKwargs

START = 5
SAVE_AT = (3, 5, 8)  # before, at and after the start of compression; all of them in the middle of an epoch
STEPS = 13
STEPS_PER_EPOCH = 6
ACCUMULATED = 2


class Run:
    def __init__(self, hooked: bool, start: int = START) -> None:
        set_seed(5)
        arguments: dict[str, Any] = {"bucket_cap_mb": SEVERAL_BUCKETS_MB}
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": start}
        self.handler = (
            CommHookKwargs(hook="powerSGD", hook_options=options, **arguments)
            if hooked
            else DistributedDataParallelKwargs(**arguments)
        )
        self.accelerator = Accelerator(
            kwargs_handlers=[self.handler],
            gradient_accumulation_steps=ACCUMULATED,
            # Without it the order of batches in the middle of an epoch does not come back, hook or not.
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        assert self.accelerator.distributed_type.value == "MULTI_CPU"
        assert self.accelerator.num_processes == 2
        images = torch.randn(STEPS_PER_EPOCH * ACCUMULATED * 2 * 4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(images, images.mean(dim=(1, 2, 3)).mul(40).long() % 10)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.losses: list[float] = []

    def train(self, begin: int = 0, save_to: Path | None = None) -> Run:
        step = begin
        while step < STEPS:
            epoch, done = divmod(step, STEPS_PER_EPOCH)
            self.loader.set_epoch(epoch)
            for images, labels in self.accelerator.skip_first_batches(self.loader, done * ACCUMULATED):
                with self.accelerator.accumulate(self.model):
                    loss = torch.nn.functional.cross_entropy(self.model(images), labels)
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                    self.losses.append(loss.item())
                if not self.accelerator.sync_gradients:
                    continue
                step += 1
                if save_to is not None and step in SAVE_AT:
                    self.accelerator.save_state(str(save_to / f"step{step}"))
                if step == STEPS:
                    break
        return self

    def outcome(self) -> dict[str, Any]:
        hook = getattr(self.handler, "attached", None)
        return {
            "losses": self.losses,
            "weights": flat(self.model.parameters()),
            "learning_rate": self.scheduler.get_last_lr(),
            "residuals": residuals(hook) if hook is not None else None,
            "stats": hook.stats() if hook is not None else None,
        }


def through(folder: Path) -> dict[Any, Any]:
    return {name: Run(name == "hook").train(save_to=folder / name).outcome() for name in ("hook", "control")}


def resume(folder: Path) -> dict[Any, Any]:
    outcomes: dict[Any, Any] = {}
    for name in ("hook", "control"):
        for step in SAVE_AT:
            run = Run(name == "hook", start=900)  # wrong on purpose: what was saved wins
            run.accelerator.load_state(str(folder / name / f"step{step}"))
            outcomes[name, step] = run.train(begin=step).outcome()
    # Once more without our files.
    step = SAVE_AT[-1]
    if int(os.environ["RANK"]) == 0:
        stripped = shutil.copytree(folder / "hook" / f"step{step}", folder / "stripped")
        for path in stripped.glob("comm_hook*"):
            path.unlink()
    dist.barrier()
    run = Run(True)
    run.accelerator.load_state(str(folder / "stripped"))
    outcomes["stripped", step] = run.train(begin=step).outcome()
    return outcomes


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    outcomes = {"through": through, "resume": resume}[sys.argv[2]](folder)
    torch.save(outcomes, folder / f"{sys.argv[2]}{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # Accelerate, DDP and gloo sometimes abort while the interpreter ends, with a hook or without.
    os._exit(0)
