"""The front ends that bring the training loop: Lightning and the Trainer of transformers. See
chaos_fronts.py.
"""

import os
from typing import Any

import torch

from tests.stress.chaos_cases import GROUP_TIMEOUT_S, SAVE_EVERY, complete_checkpoints
from tests.stress.chaos_fronts import Job, Trained
from tests.stress.chaos_watch import TIMEOUT, Watch
from tests.support.training import SEVERAL_BUCKETS_MB, batch, flat, make_model


def _epoch(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Yield the samples of `SAVE_EVERY` steps; what is saved is a whole epoch of the loader."""
    images, labels = zip(
        *(batch(step, rank) for step in range(SAVE_EVERY) for rank in range(ranks)), strict=True
    )
    return torch.cat(images), torch.cat(labels)


def lightning(job: Job, watch: Watch) -> Trained:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.tensor import DTensor
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_commhooks import CommHookDDP, CommHookFSDP2
    from tests.support.sharded import shard

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def configure_model(self) -> None:
            if job.topology != "fsdp2" or any(
                isinstance(parameter, DTensor) for parameter in self.parameters()
            ):
                return
            shard(self.net, self.trainer.strategy.device_mesh["shard"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            watch.at("between", self.trainer.global_step)
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

        def on_train_start(self) -> None:
            watch.begins(
                self.trainer.global_step, self.net, lambda: self.trainer.strategy.comm_hook
            )

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            watch.at("saving", self.trainer.global_step)

    ranks = int(os.environ["WORLD_SIZE"])
    if job.topology == "fsdp2":
        strategy: Any = CommHookFSDP2(job.config, replicate_size=2, timeout=TIMEOUT)
    else:
        strategy = CommHookDDP(
            job.config, bucket_cap_mb=SEVERAL_BUCKETS_MB, timeout=TIMEOUT, **job.nodes
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=job.steps // SAVE_EVERY,
        strategy=strategy,
        callbacks=[ModelCheckpoint(job.folder, filename="{step:02}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
    )
    complete = complete_checkpoints(job.folder)
    model = Model()
    loader = DataLoader(TensorDataset(*_epoch(ranks)), batch_size=8)
    trainer.fit(model, loader, ckpt_path=str(complete[-1]) if complete else None)
    watch.no_file_was_as_large()
    return flat(model.parameters()), strategy.comm_hook


def trainer(job: Job, watch: Watch) -> Trained:
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import TrainerCallback, TrainingArguments

    from accelerate_commhooks.transformers import CommHookTrainer
    from tests.support.accelerators import pretend_to_have_accelerators

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.net(images), labels)}

    class Watching(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.begins(state.global_step, made.model.net, lambda: made.comm_hook)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.at("between", state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % SAVE_EVERY == 0:
                watch.at("saving", state.global_step)

    sharded: dict[str, Any] = {}
    if job.topology == "fsdp2":
        sharded = {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "auto_wrap_policy": "SIZE_BASED_WRAP",
                "min_num_params": 500,
            },
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        }
    arguments = TrainingArguments(
        str(job.folder),
        use_cpu=True,
        max_steps=job.steps,
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        ddp_bucket_cap_mb=SEVERAL_BUCKETS_MB,
        ddp_timeout=GROUP_TIMEOUT_S,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **sharded,
    )
    if job.topology == "fsdp2":
        pretend_to_have_accelerators()
    dataset = [
        {"images": image, "labels": label}
        for image, label in zip(*_epoch(int(os.environ["WORLD_SIZE"])), strict=True)
    ]
    made = CommHookTrainer(
        Model(),
        arguments,
        train_dataset=dataset,
        callbacks=[Watching()],
        hook=job.config,
        **job.nodes,
    )
    complete = complete_checkpoints(job.folder)
    made.train(resume_from_checkpoint=str(complete[-1]) if complete else None)
    watch.no_file_was_as_large()
    return flat(made.model.parameters()), made.comm_hook
