"""Overrides `Accelerator.prepare` for models that it neither wraps in DDP nor gives to its handler.

FSDP2 with `ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)`: Accelerate gives FSDP a mesh of two dimensions,
and FSDP itself averages over the replicas, uncompressed, before any hook. So while `prepare` runs, Accelerate sees a
configuration with one replica. One process: the hook takes part in a training with other machines as members, or there
is nothing to average, which a warning says.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.scheduler import AcceleratedScheduler

from commhooks import HookConfigError

if TYPE_CHECKING:
    from accelerate_commhooks.handler import CommHookKwargs

_WITH_REPLICAS = (
    "ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size=GPUS_OF_EACH), or in Accelerate's configuration file "
    "parallelism_config with parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size"
)
"""How users configure one replica per machine."""


def override_prepare(accelerator: Accelerator, handler: "CommHookKwargs") -> None:
    """Override `prepare` of this one object, because Accelerate 1.15 never calls its handler for models that it shards
    or does not wrap: shard trained models within replicas, and attach the hook of `handler`; also to the model of a
    machine with one process that has other machines as members. A machine that comes takes the state of prepared
    schedulers."""
    method, schedulers = type(accelerator).prepare, itertools.count()

    @functools.wraps(method)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        trained = any(parameter.requires_grad for model in models for parameter in model.parameters())
        kind = accelerator.distributed_type if accelerator.ddp_handler is handler else None
        shards = kind is DistributedType.FSDP
        alone = kind is DistributedType.NO and handler.members is not None and not handler.off
        with _one_replica(accelerator) if trained and shards and not handler.off else contextlib.nullcontext():
            prepared = method(accelerator, *args, **kwargs)
        attach = handler.attach_to_replica if shards else handler.attach_alone
        found = prepared if isinstance(prepared, (tuple, list)) else [prepared]
        for each in found if trained and (shards or alone) else ():
            if isinstance(each, torch.nn.Module):
                attach(accelerator, each)
        members = handler.attached.members if kind is not None and handler.attached is not None else None
        for each in found:
            if members is not None and isinstance(each, AcceleratedScheduler):
                members.register(f"scheduler {next(schedulers)}", each.state_dict, each.load_state_dict)
        return prepared

    accelerator.prepare = prepare


def warn_at_first_prepare(accelerator: Accelerator, handler: "CommHookKwargs") -> None:
    """Override the first call of `prepare`, to warn if Accelerate then wraps no model, because it runs one process."""

    @functools.wraps(type(accelerator).prepare)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        del accelerator.prepare
        if accelerator.distributed_type is DistributedType.NO:
            handler.warn_alone()
        return accelerator.prepare(*args, **kwargs)

    accelerator.prepare = prepare


@contextlib.contextmanager
def _one_replica(accelerator: Accelerator) -> Iterator[None]:
    check_takes_hook(accelerator)
    config = accelerator.parallelism_config
    narrowed = copy.copy(config)
    narrowed.dp_replicate_size = 1
    accelerator.state.parallelism_config = narrowed
    try:
        yield
    finally:
        accelerator.state.parallelism_config = config


def replicas_of(accelerator: Accelerator) -> dist.ProcessGroup:
    if accelerator.parallelism_config.dp_replicate_enabled:
        return accelerator.torch_device_mesh["dp_replicate"].get_group()
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)  # one replica


def check_takes_hook(accelerator: Accelerator) -> None:
    """Raise HookConfigError if Accelerate neither wraps models in DDP nor shards replicas of them. `ParallelismConfig`
    may specify a single sharded replica: a run that has lost the other replicas goes on, as with DDP and one rank."""
    kind = accelerator.distributed_type
    # NO: one process without communication; the same script may be started with several processes later.
    if kind is DistributedType.NO or kind.name.startswith("MULTI_"):
        return
    if kind is not DistributedType.FSDP:
        raise HookConfigError(
            f"this accelerator runs with {kind}, which does not wrap models in DistributedDataParallel: a "
            "communication hook cannot be attached"
        )
    config = accelerator.parallelism_config
    if not accelerator.is_fsdp2:
        raise HookConfigError(
            "FSDP1 (fsdp_version=1) takes no hook of commhooks: its own hooks are not called with hybrid sharding. Use "
            f"fsdp_version=2, with {_WITH_REPLICAS}"
        )
    if config is None:
        raise HookConfigError(
            f"FSDP2 shards one replica of the model over all {accelerator.num_processes} ranks and averages the "
            "gradients itself, so a communication hook has nothing to average. To compress between machines, use one "
            f"replica per machine: {_WITH_REPLICAS}. To train without a hook, use hook=None"
        )
    if others := config.non_dp_dim_names:
        raise HookConfigError(
            f"{' and '.join(f'{name}_size' for name in others)} in ParallelismConfig: a communication hook works with "
            "dp_replicate_size and dp_shard_size only"
        )
