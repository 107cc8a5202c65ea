"""Overrides `Accelerator.prepare`, when the user calls `CommHookKwargs.attach`, for models that
Accelerate 1.15 neither wraps in DDP nor gives to its handler.

FSDP2 with `ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)`: Accelerate gives FSDP a mesh
of two dimensions, and FSDP itself averages over the replicas, uncompressed, before any hook. So
while `prepare` runs, Accelerate sees a configuration with one replica. One process: the hook takes
part in a run with other machines as members.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.scheduler import AcceleratedScheduler

from commhooks import CommHook, HookConfigError
from commhooks.hook.plugin_api import HookRequest

_WITH_REPLICAS = (
    "ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size=GPUS_OF_EACH), or in Accelerate's"
    " configuration file parallelism_config with parallelism_config_dp_replicate_size and"
    " parallelism_config_dp_shard_size"
)
"""How users configure one replica per machine."""


class Handler(Protocol):
    """What `prepare` needs of a `CommHookKwargs`."""

    @property
    def off(self) -> bool: ...

    @property
    def request(self) -> HookRequest: ...

    @property
    def attached(self) -> CommHook | None: ...

    def attach_model(self, model: torch.nn.Module, accelerator: Accelerator) -> None: ...


def override_prepare(accelerator: Accelerator, handler: Handler) -> None:
    """Override `prepare` of this one object, as long as `handler` is the accelerator's.

    It shards trained models within replicas, attaches the hook to them, or to the model of a
    machine with one process, and registers prepared schedulers with the hook's `members`, so that a
    machine that joins takes their state.
    """
    method = type(accelerator).prepare
    schedulers = itertools.count()

    @functools.wraps(method)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        if accelerator.ddp_handler is not handler or handler.off:
            return method(accelerator, *args, **kwargs)
        shards = accelerator.distributed_type is DistributedType.FSDP
        models = [model for model in args if isinstance(model, torch.nn.Module)]
        trained = any(
            parameter.requires_grad for model in models for parameter in model.parameters()
        )
        alone = handler.request.shards_alone
        with _one_replica(accelerator, alone) if trained and shards else contextlib.nullcontext():
            result = method(accelerator, *args, **kwargs)
        prepared = result if isinstance(result, (tuple, list)) else [result]
        if trained and (shards or accelerator.distributed_type is DistributedType.NO):
            for model in prepared:
                if isinstance(model, torch.nn.Module):
                    handler.attach_model(model, accelerator)
        hook = handler.attached
        for scheduler in prepared if hook is not None and hook.members is not None else ():
            if isinstance(scheduler, AcceleratedScheduler):
                name = f"scheduler {next(schedulers)}"
                hook.members.register(name, scheduler.state_dict, scheduler.load_state_dict)
        return result

    accelerator.prepare = prepare


@contextlib.contextmanager
def _one_replica(accelerator: Accelerator, shards_alone: bool) -> Iterator[None]:
    check_takes_hook(accelerator, shards_alone=shards_alone)
    config = accelerator.parallelism_config
    if config is None:
        yield
        return
    narrowed = copy.copy(config)
    narrowed.dp_replicate_size = 1
    accelerator.state.parallelism_config = narrowed
    try:
        yield
    finally:
        accelerator.state.parallelism_config = config


def replicas_of(accelerator: Accelerator, request: HookRequest) -> dist.ProcessGroup | None:
    config = accelerator.parallelism_config
    if config is not None and config.dp_replicate_enabled:
        return accelerator.torch_device_mesh["dp_replicate"].get_group()
    if request.shards_alone:
        return None
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)  # one replica


def check_takes_hook(accelerator: Accelerator, *, shards_alone: bool = False) -> None:
    """Raise HookConfigError if Accelerate neither wraps models in DDP nor shards replicas of them.

    `shards_alone`: whether only FSDP2's own collectives are compressed.

    `ParallelismConfig` may specify a single sharded replica: a run that has lost the other replicas
    goes on, as with DDP and one rank.
    """
    kind = accelerator.distributed_type
    # NO: one process without communication; the same script may be started with several processes
    # later.
    if kind is DistributedType.NO:
        return
    config = accelerator.parallelism_config
    if others := [] if config is None else config.non_dp_dim_names:
        raise HookConfigError(
            f"{' and '.join(f'{name}_size' for name in others)} in ParallelismConfig: a"
            " communication hook works with dp_replicate_size and dp_shard_size only"
        )
    if kind.name.startswith("MULTI_"):
        return
    if kind is not DistributedType.FSDP:
        raise HookConfigError(
            f"this accelerator runs with {kind}, which does not wrap models in"
            " DistributedDataParallel: a communication hook cannot be attached"
        )
    if not accelerator.is_fsdp2:
        raise HookConfigError(
            "FSDP1 (fsdp_version=1) takes no hook of commhooks: its own hooks are not called with"
            f" hybrid sharding. Use fsdp_version=2, with {_WITH_REPLICAS}"
        )
    if config is None and not shards_alone:
        raise HookConfigError(
            f"FSDP2 shards one replica of the model over all {accelerator.num_processes} ranks and"
            " averages the gradients itself, so a communication hook has nothing to average. To"
            f" compress between machines, use one replica per machine: {_WITH_REPLICAS}. To"
            " compress FSDP2's own collectives, use shards='int8' and hook=None. To train without a"
            " hook, use hook=None"
        )
