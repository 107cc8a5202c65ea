"""FSDP2 in Accelerate: `prepare` shards the model within each replica and leaves the average over the replicas to the
hook.

With `ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)` Accelerate shards over a mesh of two dimensions, with
which FSDP itself averages over the replicas, uncompressed, before any hook. Accelerate asks its `parallelism_config`
for these dimensions (`fsdp_dim_names`); while `prepare` runs, the answer is that of the shards alone.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType

from accelerate_commhooks.saving import override_saves
from commhooks import HookConfigError
from commhooks.hook.for_plugins import HookRequest

if TYPE_CHECKING:
    from accelerate_commhooks.handler import CommHookKwargs

WITH_REPLICAS = (
    "ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size=GPUS_OF_EACH), or in Accelerate's configuration file "
    "parallelism_config with parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size"
)
"""What to write for replicas that are sharded within a machine each."""
_REPLICAS = "dp_replicate"


def check_leaves_something(accelerator: Accelerator) -> None:
    """Check that something of the work of `accelerator` is left to a hook. Of one that shards, one replica is enough
    where `ParallelismConfig` asks for it: a run that has lost the others goes on, as with DDP and one rank.

    Raises:
        HookConfigError: it is not; the message says what to write.
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
            f"fsdp_version=2, with {WITH_REPLICAS}"
        )
    if config is None:
        raise HookConfigError(
            f"FSDP2 shards one replica of the model over all {accelerator.num_processes} ranks and averages the "
            "gradients itself, so that nothing is left to a communication hook. To compress between machines, shard "
            f"within each of them: {WITH_REPLICAS}. To go on without a hook, use hook=None"
        )
    if others := config.non_dp_dim_names:
        raise HookConfigError(
            f"a communication hook beside {' and '.join(f'{name}_size' for name in others)} in ParallelismConfig: it "
            "works with dp_replicate_size and dp_shard_size only"
        )


def replicas_of(accelerator: Accelerator) -> dist.ProcessGroup:
    """The ranks that hold the same shard as this one, of an accelerator that has passed `check_leaves_something`.
    All ranks must call this."""
    if accelerator.parallelism_config.dp_replicate_enabled:
        return accelerator.torch_device_mesh[_REPLICAS].get_group()
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)  # one replica


def saved_by_replicas(request: HookRequest, *, given: bool) -> HookRequest:
    """`request` with the `save_residual` of a model that is sharded within replicas. `given`: the user has given that
    of `request`.

    Raises:
        HookConfigError: it cannot be that one.
    """
    if request.save_residual == "per_rank" and given:
        raise HookConfigError(
            "save_residual='per_rank' with a model sharded by FSDP2: its checkpoints hold the mean over the "
            "replicas, 'mean' (the default), or no residuals, 'drop'"
        )
    return dataclasses.replace(request, save_residual="drop" if request.save_residual == "drop" else "mean")


def serve_replicas(accelerator: Accelerator, handler: "CommHookKwargs") -> None:
    """From now on, where `accelerator` shards by FSDP and has this handler, shard within replicas in `prepare`, attach
    the hook to what that returns.

    Accelerate 1.15 tells handlers nothing of models that it shards. So `prepare` is overridden, on this one object; for
    the methods that save see `HookedSave`.
    """
    overridden = type(accelerator)

    def serves() -> bool:
        return accelerator.distributed_type is DistributedType.FSDP and accelerator.ddp_handler is handler

    @functools.wraps(Accelerator.prepare)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        trained = any(parameter.requires_grad for model in models for parameter in model.parameters())
        if not (trained and serves()):
            return overridden.prepare(accelerator, *args, **kwargs)
        with contextlib.nullcontext() if handler.off else _within_replicas(accelerator):
            prepared = overridden.prepare(accelerator, *args, **kwargs)
        for each in prepared if isinstance(prepared, (tuple, list)) else [prepared]:
            if isinstance(each, torch.nn.Module):
                handler.attach_to_replica(accelerator, each)
        return prepared

    accelerator.prepare = prepare
    override_saves(accelerator)


@contextlib.contextmanager
def _within_replicas(accelerator: Accelerator) -> Iterator[None]:
    """Accelerate shards over the mesh of this replica."""
    check_leaves_something(accelerator)
    config = accelerator.parallelism_config
    names = [name for name in config.fsdp_dim_names if name != _REPLICAS]
    narrowed = copy.copy(config)
    narrowed.__class__ = type("WithinReplica", (type(config),), {"fsdp_dim_names": names})
    accelerator.state.parallelism_config = narrowed
    try:
        yield
    finally:
        accelerator.state.parallelism_config = config
