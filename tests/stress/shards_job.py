"""Trains on digits with `shards="int8"`, one rank of several machines: started by
shards_over_machines.py.

    torchrun ... tests/stress/shards_job.py FRONT FOLDER [--dies-at STEP] [--resume]

A rank dies in the second of two epochs; a checkpoint is saved after the first. Every rank prints a
line of JSON at the end.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.digits import digits, digits_net
from tests.support.training import flat

EPOCHS, BATCH = 2, 16


@dataclass(frozen=True)
class Job:
    folder: Path
    dies_at: int | None
    resumes: bool

    def begins(self, step: int) -> None:
        """The last rank is killed before this step, if it is to die there."""
        if step == self.dies_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


Trained = tuple[torch.nn.Module, Any]
"""The sharded model and the hook."""


def lightning(job: Job) -> Trained:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from lightning_commhooks import CommHookFSDP2
    from tests.support.sharded import shard

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = digits_net()

        def configure_model(self) -> None:
            shard(self.net, self.trainer.strategy.device_mesh["shard"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            job.begins(self.trainer.global_step)
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.003)

    strategy = CommHookFSDP2(shards="int8", replicate_size=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=EPOCHS,
        strategy=strategy,
        callbacks=[ModelCheckpoint(job.folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    checkpoint = str(job.folder / "epoch=0.ckpt") if job.resumes else None
    trainer.fit(model, DataLoader(digits()[0], batch_size=BATCH), ckpt_path=checkpoint)
    return model.net, strategy.comm_hook


def accelerate(job: Job) -> Trained:
    from torch.utils.data import DataLoader

    from accelerate_commhooks import CommHookKwargs
    from tests.support.accelerators import sharding_accelerator

    dist.init_process_group("gloo")
    handler = CommHookKwargs(shards="int8")
    accelerator = sharding_accelerator(handler, replicas=None)
    model = digits_net()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.003),
        DataLoader(digits()[0], batch_size=BATCH),
    )
    if job.resumes:
        accelerator.load_state(str(job.folder / "epoch0"))
    step = len(loader) if job.resumes else 0
    for epoch in range(int(job.resumes), EPOCHS):
        for images, labels in loader:
            job.begins(step)
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            step += 1
        accelerator.save_state(str(job.folder / f"epoch{epoch}"))
    return model, handler.attached


def transformers(job: Job) -> Trained:
    from transformers import TrainerCallback, TrainingArguments

    from accelerate_commhooks.transformers import CommHookTrainer
    from tests.support.accelerators import pretend_to_have_accelerators

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = digits_net()

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.net(images), labels)}

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            job.begins(state.global_step)

    steps = len(digits()[0]) // (BATCH * int(os.environ["WORLD_SIZE"]))
    arguments = TrainingArguments(
        str(job.folder),
        use_cpu=True,
        max_steps=EPOCHS * steps,
        save_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=0.003,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5000},
    )
    pretend_to_have_accelerators()
    dataset = [{"images": image, "labels": label} for image, label in digits()[0]]
    trainer = CommHookTrainer(
        Model(), arguments, train_dataset=dataset, callbacks=[Watching()], shards="int8"
    )
    checkpoint = str(job.folder / f"checkpoint-{steps}") if job.resumes else None
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.model.net, trainer.comm_hook


FRONTS: dict[str, Callable[[Job], Trained]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("front", choices=FRONTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dies-at", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, hook = FRONTS[args.front](Job(args.folder, args.dies_at, args.resume))
    weights = flat(model.parameters())
    whole = digits_net()
    torch.nn.utils.vector_to_parameters(weights, whole.parameters())
    images, labels = digits()[1].tensors
    right = (whole.eval()(images).argmax(1) == labels).float().mean()
    line = {
        "rank": dist.get_rank(),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        "right": float(right),
        "steps": hook.stats()["step"],
        "shards": hook.stats()["shards"],
    }
    print(json.dumps(line), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo sometimes aborts while the interpreter ends


if __name__ == "__main__":
    main()
