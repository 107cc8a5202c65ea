"""The front ends whose training loop is the user's: plain torch, Fabric, Accelerate. Those that
bring one: chaos_trainers.py.

Each builds a training with a given topology and hook, which saves at every `SAVE_EVERY` steps, so
that only what is complete counts as a checkpoint (`complete_checkpoints`), and goes on from the
newest one.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from tests.stress.chaos_cases import SAVE_EVERY, complete_checkpoints
from tests.stress.chaos_watch import TIMEOUT, Watch
from tests.support.training import SEVERAL_BUCKETS_MB, batch, flat, make_model


@dataclass(frozen=True)
class Job:
    """What a front end is to train."""

    folder: Path
    topology: str
    config: commhooks.HookConfig
    steps: int

    @property
    def nodes(self) -> dict[str, int]:
        """An argument of every front end's hook."""
        return {"ranks_per_node": 2} if self.topology == "nodes" else {}


Trained = tuple[torch.Tensor, Any]
"""The final weights, whole, and the hook."""


@dataclass
class ByHand:
    """A training on this rank. `save` and `load` are for all ranks together."""

    model: Any
    optimizer: Any
    hook: commhooks.CommHook
    save: Callable[[Path, int], None]
    load: Callable[[Path], None]
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    suffix: str = ""

    def train(self, job: Job, watch: Watch) -> Trained:
        complete = complete_checkpoints(job.folder)
        step = 0
        if complete:
            self.load(complete[-1])
            step = int(complete[-1].stem[5:])
        watch.begins(step, getattr(self.model, "module", self.model), lambda: self.hook)
        while step < job.steps:
            watch.at("between", step)
            images, labels = batch(step, dist.get_rank())
            self.optimizer.zero_grad()
            self.backward(torch.nn.functional.cross_entropy(self.model(images), labels))
            self.optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                watch.at("saving", step)
                self.save(job.folder / f"step_{step:02}{self.suffix}", step)
        watch.no_file_was_as_large()
        return flat(self.model.parameters()), self.hook


def _new() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    return model, _optimizer(model)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _renamed_when_complete(write: Callable[[Path], Any]) -> Callable[[Path, int], None]:
    """All ranks write into a folder that gets its name when the last of them is done."""

    def save(path: Path, step: int) -> None:
        unfinished = path.with_name("unfinished")
        if dist.get_rank() == 0 and unfinished.exists():
            shutil.rmtree(unfinished)
        dist.barrier()
        write(unfinished)
        dist.barrier()
        if dist.get_rank() == 0:
            unfinished.rename(path)
        dist.barrier()

    return save


# ---- plain torch ---------------------------------------------------------------------------------


def plain(job: Job, watch: Watch) -> Trained:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)
    watch.outlive_torchrun()
    made = _plain_sharded(job) if job.topology == "fsdp2" else _plain_ddp(job)
    return made.train(job, watch)


def _plain_ddp(job: Job) -> ByHand:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    optimizer = _optimizer(model)
    hook = commhooks.attach(model, job.config, save_residual="mean", **job.nodes)

    def save(path: Path, step: int) -> None:
        state = hook.state_dict()  # ends a round of DiLoCo: before model and optimizer
        # Marked inexact when a rank has gone: the checkpoint that is there already is worth more.
        if dist.get_rank() == 0 and state["exact"]:
            temporary = path.with_suffix(".tmp")
            with open(temporary, "wb") as file:
                torch.save(
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "hook": state,
                    },
                    file,
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)

    def load(path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        hook.load_state_dict(saved["hook"])

    return ByHand(model, optimizer, hook, save, load, suffix=".pt")


def _plain_sharded(job: Job) -> ByHand:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from tests.support.sharded import mesh_of, shard

    mesh = mesh_of(2, dist.get_world_size() // 2)
    model = shard(make_model(), mesh["shard"])
    hook = commhooks.attach(model, job.config, replicate_group=mesh["replicate"])
    optimizer = _optimizer(model)

    def content() -> dict[str, Any]:
        hook.synchronize(optimizers=True)
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states, "hook": hook}

    def load(path: Path) -> None:
        saved = content()
        dcp.load(saved, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )

    return ByHand(
        model,
        optimizer,
        hook,
        _renamed_when_complete(lambda path: dcp.save(content(), checkpoint_id=path)),
        load,
    )


# ---- Fabric --------------------------------------------------------------------------------------


def fabric(job: Job, watch: Watch) -> Trained:
    from lightning.fabric import Fabric

    from lightning_commhooks.fabric import CommHookDDP

    strategy = CommHookDDP(
        job.config, bucket_cap_mb=SEVERAL_BUCKETS_MB, timeout=TIMEOUT, **job.nodes
    )
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(*_new())
    hook = strategy.hook_of(model)
    assert hook is not None
    state = {"model": model, "optimizer": optimizer}
    made = ByHand(
        *(model, optimizer, hook),
        save=lambda path, step: fabric.save(path, state),  # to another name first
        load=lambda path: fabric.load(path, state) and None,
        backward=fabric.backward,
        suffix=".pt",
    )
    return made.train(job, watch)


# ---- Accelerate ----------------------------------------------------------------------------------


def accelerate(job: Job, watch: Watch) -> Trained:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from accelerate_commhooks import CommHookKwargs
    from tests.support.accelerators import sharding_accelerator

    handler = CommHookKwargs(hook=job.config, bucket_cap_mb=SEVERAL_BUCKETS_MB, **job.nodes)
    handlers = [handler, InitProcessGroupKwargs(timeout=TIMEOUT)]
    if job.topology == "fsdp2":
        accelerator = sharding_accelerator(*handlers)
    else:
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    model, optimizer = accelerator.prepare(*_new())
    assert handler.attached is not None
    made = ByHand(
        *(model, optimizer, handler.attached),
        save=_renamed_when_complete(lambda path: accelerator.save_state(str(path))),
        load=lambda path: accelerator.load_state(str(path)),
        backward=accelerator.backward,
    )
    return made.train(job, watch)
