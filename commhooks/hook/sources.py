"""Determine how a model is wrapped, and make the source of its gradients."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.collectives import resolve_group
from commhooks.errors import AttachError, HookConfigError
from commhooks.gradients.ddp import DDPGradients
from commhooks.gradients.source import GradientSource, PlainGradients
from commhooks.gradients.torch_private import compiled_from, ddp_under
from commhooks.request import HookRequest


def source_for(
    request: HookRequest,
    model: torch.nn.Module,
    process_group: dist.ProcessGroup | None,
    replicate_group: DeviceMesh | dist.ProcessGroup | None,
    accumulates: Callable[[], bool] | None,
) -> GradientSource:
    """Make the source of the gradients of `model` for a request; see `attach_request`. Makes the
    default process group for a machine with one process, if machines come and go.
    """
    machines_change = request.members is not None
    if machines_change and not dist.is_initialized():
        _process_group_of_one(model)
    if request.shards_alone and replicate_group is None and isinstance(model, FSDPModule):
        from commhooks.hook.shards_hook import source_without_replicas

        return source_without_replicas(model, process_group)
    if (
        request.shards is not None
        and replicate_group is None
        and not machines_change
        and isinstance(model, FSDPModule)
    ):
        raise HookConfigError(
            f"hook {request.name!r} with shards and without replicate_group: the hook averages over"
            " replicas, and a model that is sharded over all ranks has one. Pass hook=None, which"
            " compresses the shards alone, or the ranks that hold the same shard as replicate_group"
        )
    return source_of(
        model,
        process_group,
        replicate_group,
        unwrapped=request.averages_weights,
        one_replica=machines_change,
        accumulates=accumulates,
    )


def _process_group_of_one(model: torch.nn.Module) -> None:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def source_of(
    model: object,
    process_group: dist.ProcessGroup | None = None,
    replicate_group: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    unwrapped: bool = False,
    one_replica: bool = False,
    accumulates: Callable[[], bool] | None = None,
) -> GradientSource:
    """Make the source of a model's gradients; see `attach`. `unwrapped`: whether the hook also
    takes a module without a wrapper; `accumulates`: then returns whether the current backward pass
    does not count. `one_replica`: whether a sharded model without a `replicate_group` has one
    replica.
    """
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise HookConfigError(
            f"process_group={process_group!r}; expected a torch.distributed.ProcessGroup that this"
            " rank belongs to, for example one of torch.distributed.new_group, or None for the"
            " model's own"
        )
    if isinstance(model, FSDPModule):
        from commhooks.hook.sharded_source import sharded_source  # slow to import, and few need it

        return sharded_source(model, process_group, replicate_group, one_replica=one_replica)
    module = model if isinstance(model, torch.nn.Module) else None
    replicated = None if module is None else ddp_under(module)
    ddp_model = model if replicated is None else replicated
    takes_plain = (
        unwrapped and module is not None and not isinstance(module, FullyShardedDataParallel)
    )
    if (
        takes_plain
        and compiled_from(module) is None
        and not isinstance(ddp_model, DistributedDataParallel)
    ):
        assert module is not None
        return PlainGradients(module, resolve_group(process_group), accumulates)
    if not isinstance(ddp_model, DistributedDataParallel):
        raise _cannot_take_a_hook(model)
    if replicate_group is not None:
        raise HookConfigError(
            "replicate_group is for models sharded by fully_shard; for DistributedDataParallel pass"
            " process_group, or nothing"
        )
    return DDPGradients(ddp_model, process_group, None if replicated is None else module)


def _cannot_take_a_hook(model: object) -> AttachError:
    if isinstance(model, FullyShardedDataParallel):
        return AttachError(
            "FullyShardedDataParallel (FSDP1) takes no hook of commhooks: its own hooks are not"
            " called with hybrid sharding. Shard with torch.distributed.fsdp.fully_shard (FSDP2)"
            " instead, over the inner mesh only, and pass replicate_group"
        )
    inner = compiled_from(model)
    if isinstance(inner, DistributedDataParallel):
        return AttachError(
            "attach the hook to the DistributedDataParallel model before torch.compile wraps it"
        )
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    if wrapped := [name for name, part in parts if isinstance(part, DistributedDataParallel)]:
        return AttachError(
            f"{type(model).__qualname__} is not a DistributedDataParallel model, but contains some:"
            f" {', '.join(wrapped)}. Attach a hook to each of them, such as"
            f" attach(model.{wrapped[0]}, ...)"
        )
    hint = (
        "the model comes first, then the hook" if isinstance(model, str) else "wrap the model first"
    )
    return AttachError(
        "a communication hook needs a torch.nn.parallel.DistributedDataParallel model, or one"
        f" sharded by fully_shard, got a {type(model).__module__}.{type(model).__qualname__};"
        f" {hint}"
    )
