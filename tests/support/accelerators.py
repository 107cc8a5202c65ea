"""Accelerators in the worker pool, and a small run that the tests of Accelerate share."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState

from accelerate_commhooks import CommHookKwargs, unattached
from tests.support.ddp_steps import log_lines
from tests.support.training import SEVERAL_BUCKETS_MB, batch, flat, make_model, residuals

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}
# The resumed run is set up wrongly on purpose, so that loading must do the work.
WRONG = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 900}


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
main_process_port: 0
mixed_precision: "no"
"""
"""A configuration file of Accelerate."""


def section(text: str) -> str:
    """Return the configuration file with a section for commhooks."""
    return ACCELERATE + "comm_hook_config:\n" + "".join(f"  {line}\n" for line in text.splitlines())


@contextlib.contextmanager
def accelerate_launched(none: bool = False, **changes: str) -> Iterator[None]:
    """Context manager: pretend that `accelerate launch` has started this worker, with the pool's
    ranks on the CPU.

    `changes` are made to the launcher's variables; `none`: without a launcher. Accelerate 1.15
    caches what it has detected in the process; its own tests use `_reset_state` to start anew.
    """
    environ = (
        {}
        if none
        else {
            "ACCELERATE_USE_CPU": "true",
            "RANK": str(dist.get_rank()),
            "LOCAL_RANK": str(dist.get_rank()),
            "WORLD_SIZE": str(dist.get_world_size()),
            "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # nobody listens there: the process group exists already
        }
        | changes
    )
    forget_handlers()
    with mock.patch.dict(os.environ, environ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def forget_handlers() -> None:
    """Begin as in a new process, without warnings about handlers of earlier tests."""
    unattached._checks.clear()


def launched(work: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run a worker's function inside `accelerate_launched`."""

    @functools.wraps(work)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with accelerate_launched():
            return work(*args, **kwargs)

    return inside


def new_accelerator(*handlers: Any, **kwargs: Any) -> Accelerator:
    """Make an accelerator that is one of several ranks on the CPU."""
    accelerator = Accelerator(kwargs_handlers=list(handlers), **kwargs)
    assert accelerator.distributed_type.value == "MULTI_CPU"
    assert accelerator.num_processes == dist.get_world_size()
    return accelerator


def sharding_accelerator(
    *handlers: Any,
    replicas: int | None = 2,
    reshard: bool = True,
    form: str = "SHARDED_STATE_DICT",
    **kwargs: Any,
) -> Accelerator:
    """Make an accelerator that shards by FSDP2 within replicas, on the CPU. `replicas` None:
    without a ParallelismConfig.
    """
    pretend_to_have_accelerators()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=200,
        reshard_after_forward=reshard,
        state_dict_type=form,
        cpu_ram_efficient_loading=form == "FULL_STATE_DICT",
    )
    sizes = replicas and ParallelismConfig(
        dp_replicate_size=replicas, dp_shard_size=dist.get_world_size() // replicas
    )
    others = [handler for handler in handlers if not isinstance(handler, CommHookKwargs)]
    accelerator = Accelerator(
        kwargs_handlers=others, fsdp_plugin=plugin, parallelism_config=sizes, cpu=True, **kwargs
    )
    assert accelerator.is_fsdp2 and accelerator.device.type == "cpu"
    for handler in handlers:
        if isinstance(handler, CommHookKwargs):
            handler.attach(accelerator)
    return accelerator


def pretend_to_have_accelerators() -> None:
    """Make the next `Accelerator` shard on the CPU. Accelerate 1.15 shards on accelerators only,
    although FSDP2 also runs on the CPU.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


def power_sgd(options: dict[str, Any] = OPTIONS, **kwargs: Any) -> CommHookKwargs:
    kwargs = {
        "hook": "powerSGD",
        "hook_options": options,
        "bucket_cap_mb": SEVERAL_BUCKETS_MB,
    } | kwargs
    return CommHookKwargs(**kwargs)


class Training:
    """An accelerator with one model and its optimizer on this rank."""

    def __init__(
        self,
        handler: Any = None,
        *,
        accelerator: Accelerator | None = None,
        scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        self.handler = power_sgd() if handler is None else handler
        self.accelerator = accelerator or new_accelerator(self.handler, **kwargs)
        if scale is not None:  # as with mixed_precision="fp16", which is off on the CPU
            self.accelerator.scaler = torch.amp.GradScaler(
                "cpu", init_scale=scale, growth_interval=3
            )
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.step = 0

    @classmethod
    def resumed(cls, folder: Any, step: int, handler: Any = None, **kwargs: Any) -> "Training":
        """Make one with different weights and options, and load."""
        new = cls(power_sgd(WRONG) if handler is None else handler, **kwargs)
        with torch.no_grad():
            for parameter in new.model.parameters():
                parameter.add_(1)
        return new.load(folder, step)

    def train(self, steps: int) -> "Training":
        for _ in range(steps):
            images, labels = batch(self.step, self.accelerator.process_index)
            self.optimizer.zero_grad()
            self.accelerator.backward(torch.nn.functional.cross_entropy(self.model(images), labels))
            self.optimizer.step()
            self.step += 1
        return self

    def save(self, folder: Any = None) -> "Training":
        self.accelerator.save_state(None if folder is None else str(folder))
        self.accelerator.wait_for_everyone()  # Accelerate has no barrier at the end of save_state
        return self

    def load(self, folder: Any, step: int) -> "Training":
        self.accelerator.load_state(None if folder is None else str(folder))
        self.step = step
        return self

    @property
    def hook(self) -> Any:
        return self.handler.attached

    def weights(self) -> torch.Tensor:
        return flat(self.model.parameters())


Warnings = functools.partial(log_lines, ("commhooks", "accelerate_commhooks"), logging.WARNING)
"""The warnings of commhooks and its plugin, as a context."""


FILES = ["comm_hook.pt", "comm_hook_rank0.pt", "comm_hook_rank1.pt"]
"""The files of the first model, on two ranks."""


def hook_files(folder: Any) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if "comm_hook" in path.name)


def outcome(run: Training) -> dict[str, Any]:
    return {"weights": run.weights(), "residuals": residuals(run.hook), "stats": run.hook.stats()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two outcomes are equal."""
    assert torch.equal(one["weights"], other["weights"])
    assert one["residuals"].keys() == other["residuals"].keys()
    assert all(
        torch.equal(one["residuals"][name], other["residuals"][name]) for name in one["residuals"]
    )
