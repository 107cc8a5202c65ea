"""FSDP2 in Accelerate: shard the model within each replica, and let the hook average between the replicas.

With `ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)` Accelerate shards over a mesh of two dimensions, with
which FSDP itself averages over the replicas, uncompressed, before any hook. While `prepare` runs, Accelerate therefore
sees a configuration with one replica.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType

from commhooks import HookConfigError

if TYPE_CHECKING:
    from accelerate_commhooks.handler import CommHookKwargs

_WITH_REPLICAS = (
    "ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size=GPUS_OF_EACH), or in Accelerate's configuration file "
    "parallelism_config with parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size"
)
"""What to write for replicas that are sharded within a machine each."""


def override_prepare(accelerator: Accelerator, handler: "CommHookKwargs") -> None:
    """Let `prepare` shard trained models within replicas, and attach the hook of `handler` to what it returns.

    Accelerate 1.15 never calls its handler for models that it shards. So `prepare` is overridden, on this one object.
    """
    method = type(accelerator).prepare

    @functools.wraps(method)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        trained = any(parameter.requires_grad for model in models for parameter in model.parameters())
        shards = accelerator.distributed_type is DistributedType.FSDP and accelerator.ddp_handler is handler
        if not (trained and shards):
            return method(accelerator, *args, **kwargs)
        with contextlib.nullcontext() if handler.off else _one_replica(accelerator):
            prepared = method(accelerator, *args, **kwargs)
        for each in prepared if isinstance(prepared, (tuple, list)) else [prepared]:
            if isinstance(each, torch.nn.Module):
                handler.attach_to_replica(accelerator, each)
        return prepared

    accelerator.prepare = prepare


@contextlib.contextmanager
def _one_replica(accelerator: Accelerator) -> Iterator[None]:
    check_leaves_something(accelerator)
    config = accelerator.parallelism_config
    narrowed = copy.copy(config)
    narrowed.dp_replicate_size = 1
    accelerator.state.parallelism_config = narrowed
    try:
        yield
    finally:
        accelerator.state.parallelism_config = config


def replicas_of(accelerator: Accelerator) -> dist.ProcessGroup:
    """The ranks that hold the same shard as this one, of an accelerator that has passed `check_leaves_something`.
    All ranks must call this."""
    if accelerator.parallelism_config.dp_replicate_enabled:
        return accelerator.torch_device_mesh["dp_replicate"].get_group()
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)  # one replica


def check_leaves_something(accelerator: Accelerator) -> None:
    """Check that Accelerate leaves averages to a hook. One sharded replica is enough if `ParallelismConfig` asks for
    it: a run that has lost the others goes on, as with DDP and one rank.

    Raises:
        HookConfigError: it leaves none; the message says what to write.
    """
    kind = accelerator.distributed_type
    # NO: one process without communication; the same script may be started with several processes later.
    if kind is DistributedType.NO or kind.name.startswith("MULTI_"):
        return
    if kind is not DistributedType.FSDP:
        raise HookConfigError(
            f"this accelerator runs with {kind}, where models are not wrapped in "
            "DistributedDataParallel: there is nothing to attach a communication hook to"
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
            "gradients itself, so that nothing is left to a communication hook. To compress between machines, shard "
            f"within each of them: {_WITH_REPLICAS}. To go on without a hook, use hook=None"
        )
    if others := config.non_dp_dim_names:
        raise HookConfigError(
            f"a communication hook beside {' and '.join(f'{name}_size' for name in others)} in ParallelismConfig: it "
            "works with dp_replicate_size and dp_shard_size only"
        )
