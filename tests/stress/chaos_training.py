"""A training that is killed: chaos_training.py FRAMEWORK FOLDER, under torchrun with `--max-restarts`; see chaos.py.

FRAMEWORK is a key of `FRAMEWORKS`. Every one saves at each `SAVE_EVERY` steps so that only what is complete
has the name of a checkpoint, and goes on from the newest one. The variable `CHAOS_KILLS`, a JSON list with an entry per
attempt, says how a rank of that attempt ends itself by SIGKILL:

    {"rank": 1, "after_s": 0.7}                      so long after training began, wherever it is then
    {"rank": 0, "phase": "backward", "step": 7}      at that step; the phases are those of `PHASES`
    {..., "issued": "bucket 0 at step 5"}            not before this message has been sent, by a thread of the hook

What happened is noted in FOLDER: killed-ATTEMPT.json, error-ATTEMPT-RANK.json, start-ATTEMPT-RANK.json and, at the end,
final-RANK.pt.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support.training import Run, batch, flat, make_model

STEPS = int(os.environ.get("CHAOS_STEPS", "30"))
SAVE_EVERY = 5
TIMEOUT = timedelta(seconds=20)  # of the process group; two ranks that start on a busy machine need some of it
OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}
MIDDLE = "5.weight"  # the parameter whose gradient comes when some buckets are under way and others are not
PHASES = {
    "start": "before the ranks have met",
    "backward": "between the hook calls of two buckets",
    "save": "with a part of a file of the checkpoint written",
    "between": "between two steps",
}


class Killer:
    """Ends this rank as the plan says, and leaves a note of where it was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        plans = json.loads(os.environ.get("CHAOS_KILLS", "[]"))
        mine = self.attempt < len(plans) and plans[self.attempt]["rank"] == self.rank
        self.plan: dict[str, Any] = plans[self.attempt] if mine else {}
        self.phase, self.step = "start", 0
        self.hook: Callable[[], Any] = lambda: None

    def at(self, phase: str, step: int | None = None) -> None:
        """The training has come to this phase."""
        self.phase, self.step = phase, self.step if step is None else step
        if self.plan.get("phase") == phase and self.step >= self.plan["step"]:
            while not (
                self.hook() is None or str(self.hook().stats()["last_issued"]).endswith(self.plan.get("issued", ""))
            ):
                time.sleep(0.001)
            self.kill()

    def kill(self, by_timer: bool = False) -> None:
        last = None if by_timer or self.hook() is None else self.hook().stats()["last_issued"]
        self.note("killed", phase=self.phase, step=self.step, rank=self.rank, by_timer=by_timer, last_issued=last)
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, kind: str, **what: Any) -> None:
        name = f"{kind}-{self.attempt}" + ("" if kind == "killed" else f"-{self.rank}")
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(json.dumps({"time": time.time(), **what}))
        temporary.replace(self.folder / f"{name}.json")

    def training_begins(self, step: int, model: torch.nn.Module, hook: Callable[[], Any]) -> None:
        """From here on it can be killed in mid-backward and at any time."""
        self.note("start", step=step)
        self.hook = hook
        parameter = dict(model.named_parameters())[MIDDLE]
        if isinstance(parameter, DTensor):  # later units were reduced then
            layer = model.get_submodule(MIDDLE.rpartition(".")[0])
            layer.register_full_backward_hook(lambda *_: self.at("backward"))
        else:
            parameter.register_hook(lambda gradient: self.at("backward"))
        if "after_s" in self.plan:
            timer = threading.Timer(self.plan["after_s"], self.kill, [True])
            timer.daemon = True
            timer.start()

    def wrap_write(self, owner: Any) -> None:
        """Be there when a part of what `owner.write` writes is written."""
        if self.plan.get("phase") != "save":
            return
        original: Callable[..., Any] = owner.write

        def write(file: Any, data: bytes) -> Any:
            half = len(data) // 2
            first = original(file, data[:half])
            file.flush()
            self.at("save")
            return (first or 0) + (original(file, data[half:]) or 0)

        owner.write = write


# ------------------------------------------------------------------------------------------------------- plain torch


def plain(folder: Path, killer: Killer, **attach: Any) -> tuple[torch.Tensor, Any]:
    """`attach`: arguments of `commhooks.attach`."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    run = Run.new(**{"hook": "powerSGD", "hook_options": OPTIONS, "save_residual": "mean", **attach})
    run.hook.joint_save_limit_s = 5.0
    path = folder / "checkpoint.pt"
    if path.exists():
        run.load(torch.load(path, weights_only=True))
    # torchrun ends the other ranks by this signal. Here they shall show that they end by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    killer.training_begins(run.step, run.ddp.module, lambda: run.hook)
    while run.step < STEPS:
        killer.at("between", run.step)
        killer.phase = "training"
        run.train(1)
        if run.step % SAVE_EVERY == 0:
            _save(run, path, killer)
    return run.weights(), run.hook


def trainer_fsdp2(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    """Two replicas of two shards, by the Trainer of transformers."""
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

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            killer.training_begins(state.global_step, trainer.model.net, lambda: trainer.comm_hook)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            killer.at("between", state.global_step)
            killer.phase = "training"

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            killer.phase, killer.step = "saving" if control.should_save else "training", state.global_step

    _kill_in_the_folder_of_the_hook(killer)
    args = TrainingArguments(
        str(folder / "trainer"),
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500},
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    pretend_to_have_accelerators()
    images, labels = zip(*(batch(step, rank) for step in range(SAVE_EVERY) for rank in range(4)), strict=True)
    dataset = [
        {"images": image, "labels": label} for image, label in zip(torch.cat(images), torch.cat(labels), strict=True)
    ]
    trainer = CommHookTrainer(
        Model(), args, train_dataset=dataset, callbacks=[Watch()], hook="powerSGD", hook_options=OPTIONS
    )
    # The Trainer writes this file last.
    complete = sorted((folder / "trainer").glob("*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    trainer.train(resume_from_checkpoint=str(complete[-1].parent) if complete else None)
    return flat(trainer.model.parameters()), trainer.comm_hook


def int8(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    """As `plain`, quantised."""
    return plain(folder, killer, hook="int8", hook_options={"block_size": 32, "start_iter": 3})


def nodes(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    """As `plain`, on two nodes of two ranks."""
    return plain(folder, killer, ranks_per_node=2)


def diloco(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    """As `plain`, with rounds of four steps, so that most saves end one early, while a half of the weights travels."""
    options = {"sync_every": 4, "fragments": 2, "delay": 1, "outer_momentum": 0.3}
    return plain(folder, killer, hook="diloco", hook_options=options)


def auto(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    """As `plain`, with a hook that becomes int8 at step 12 and has been tried at step 20."""
    from commhooks.compressors.registry import register_compressor
    from tests.support.prescribed_auto import PrescribedAuto, PrescribedAutoCompressor

    register_compressor(PrescribedAutoCompressor)
    return plain(folder, killer, hook=PrescribedAuto(measure_steps=12), hook_options=None)


def _save(run: Run, path: Path, killer: Killer) -> None:
    killer.phase = "saving"
    content = run.save()
    # Marked inexact when a rank has gone: the checkpoint that is there already is worth more.
    if dist.get_rank() == 0 and content["hook"]["exact"]:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getvalue()
        temporary = path.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            killer.at("save", run.step)
            file.write(data[len(data) // 2 :])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


# -------------------------------------------------------------------------------------------------------------- FSDP2


def fsdp2(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    """Two replicas of two shards, saved with torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import commhooks

    class Writer(dcp.FileSystemWriter):
        def finish(self, *args: Any, **kwargs: Any) -> None:
            killer.at("save")  # all tensors are there, and the file that says where is not
            super().finish(*args, **kwargs)

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    hook = commhooks.attach(model, "powerSGD", hook_options=OPTIONS, replicate_group=mesh["replicate"])
    hook.joint_save_limit_s = 5.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    complete = sorted(folder.glob("step_??"))
    if complete:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states, "hook": hook}, checkpoint_id=complete[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    step = hook.stats()["step"]
    killer.training_begins(step, model, lambda: hook)
    while step < STEPS:
        killer.at("between", step)
        killer.phase = "training"
        images, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        step += 1
        if step % SAVE_EVERY == 0:
            killer.phase, killer.step = "saving", step
            weights, states = get_state_dict(model, optimizer)
            unfinished = folder / "unfinished"
            dcp.save(
                {"model": weights, "optimizer": states, "hook": hook}, storage_writer=Writer(unfinished, overwrite=True)
            )
            if dist.get_rank() == 0:
                unfinished.rename(folder / f"step_{step:02}")
            dist.barrier()
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in model.parameters()]), hook


# --------------------------------------------------------------------------------------------------------- Lightning


def lightning(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    import lightning.pytorch as pl
    from fsspec.implementations.local import LocalFileOpener
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from commhooks import PowerSGD
    from lightning_commhooks import CommHookDDP

    killer.wrap_write(LocalFileOpener)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            killer.at("between", self.trainer.global_step)
            killer.phase = "training"
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

        def on_train_start(self) -> None:
            killer.training_begins(self.trainer.global_step, self.net, lambda: self.trainer.strategy.comm_hook)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            killer.phase, killer.step = "saving", self.trainer.global_step

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=STEPS // SAVE_EVERY,
        strategy=CommHookDDP(PowerSGD(**OPTIONS), bucket_cap_mb=0.001, timeout=TIMEOUT),
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    # A loader begins every epoch anew: an epoch is what is saved.
    images, labels = zip(*(batch(step, rank) for step in range(SAVE_EVERY) for rank in range(2)), strict=True)
    loader = DataLoader(TensorDataset(torch.cat(images), torch.cat(labels)), batch_size=8)
    model = Model()
    trainer.fit(model, loader, ckpt_path="last")
    return flat(model.parameters()), trainer.strategy.comm_hook


# -------------------------------------------------------------------------------------------------------- Accelerate


def accelerate(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from accelerate_commhooks import atomic_write
    from tests.support.accelerators import power_sgd

    class File:
        def __init__(self, file: Any) -> None:
            self.file, self.flush = file, file.flush

        def write(self, data: bytes) -> Any:
            return self.file.write(data)

    save: Any = atomic_write._save
    atomic_write._save = lambda content, file: save(content, File(file))  # type: ignore[assignment]
    killer.wrap_write(File)
    handler = power_sgd(OPTIONS)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler, InitProcessGroupKwargs(timeout=TIMEOUT)])
    return _accelerated(folder, killer, handler, accelerator)


def accelerate_fsdp2(folder: Path, killer: Killer) -> tuple[torch.Tensor, Any]:
    """Two replicas of two shards."""
    from tests.support.accelerators import power_sgd, sharding_accelerator

    _kill_in_the_folder_of_the_hook(killer)
    handler = power_sgd(OPTIONS)
    return _accelerated(folder, killer, handler, sharding_accelerator(handler))


def _kill_in_the_folder_of_the_hook(killer: Killer) -> None:
    """When all of its tensors are there, and the file that says where is not."""
    from torch.distributed.checkpoint import FileSystemWriter

    finish: Callable[..., None] = FileSystemWriter.finish

    def killed(writer: Any, *args: Any, **kwargs: Any) -> None:
        if "comm_hook" in str(writer.path):
            killer.at("save")
        finish(writer, *args, **kwargs)

    FileSystemWriter.finish = killed  # type: ignore[method-assign]


def _accelerated(folder: Path, killer: Killer, handler: Any, accelerator: Any) -> tuple[torch.Tensor, Any]:
    from tests.support.accelerators import Training

    run = Training(handler, accelerator=accelerator)
    complete = sorted(folder.glob("step_??"))
    if complete:
        run.load(complete[-1], int(complete[-1].name[5:]))
    killer.training_begins(run.step, getattr(run.model, "module", run.model), lambda: run.hook)
    while run.step < STEPS:
        killer.at("between", run.step)
        killer.phase = "training"
        run.train(1)
        if run.step % SAVE_EVERY == 0:
            killer.phase, killer.step = "saving", run.step
            _save_state(run, folder)
    return run.weights(), run.hook


def _save_state(run: Any, folder: Path) -> None:
    """All ranks write into a folder that gets its name when the last of them is done."""
    unfinished = folder / "unfinished"
    main = run.accelerator.is_main_process
    if main and unfinished.exists():
        shutil.rmtree(unfinished)
    run.accelerator.wait_for_everyone()
    run.save(unfinished)
    if main:
        unfinished.rename(folder / f"step_{run.step:02}")


# --------------------------------------------------------------------------------------------------------------- main

FRAMEWORKS = {
    "plain": plain,
    "int8": int8,
    "diloco": diloco,
    "nodes": nodes,
    "auto": auto,
    "fsdp2": fsdp2,
    "lightning": lightning,
    "accelerate": accelerate,
    "accelerate-fsdp2": accelerate_fsdp2,
    "trainer-fsdp2": trainer_fsdp2,
}


def main(framework: str, folder: Path) -> None:
    torch.set_num_threads(1)
    killer = Killer(folder)
    killer.at("start", 0)
    try:
        weights, hook = FRAMEWORKS[framework](folder, killer)
    except BaseException as error:
        killer.note("error", type=type(error).__name__, text=str(error))
        raise
    killer.phase = "end"
    torch.save({"weights": weights, "stats": hook.stats()}, folder / f"final-{killer.rank}.pt")
    killer.note("end")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1], Path(sys.argv[2]))
        status = 0
    except BaseException:
        traceback.print_exc()
    # gloo sometimes aborts while the interpreter ends, with a hook or without: end it here.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
