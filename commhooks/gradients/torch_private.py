"""All private names of torch that commhooks uses. docs/versions.md lists the consequences if one is missing.

Names that are indispensable are looked up on import, which raises ImportError. The other names are for error messages:
without them, an unsupported configuration is not detected.
"""

import contextlib
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookRunError


def _needed(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise ImportError(
            f"commhooks uses {where}.{name}, a private name that torch {torch.__version__} lacks: install a version of "
            "torch that docs/versions.md lists"
        ) from None


current_task: Callable[[], int] = _needed(torch._C, "_current_graph_task_id")
"""Return the id of this thread's backward pass, also in the callbacks at its end; -1 outside of a backward pass."""

current_autograd_node: Callable[[], Any] = _needed(torch._C, "_current_autograd_node")
"""In a callback at the end of a backward pass: return the current node of the enclosing pass, or None in the outermost
pass."""

queue_callback: Callable[[Callable[[], None]], None] = _needed(
    _needed(torch.autograd.Variable, "_execution_engine"), "queue_callback"
)
"""Call the argument at the end of this backward pass, as torch's optimizer_overlap_hooks.py does. Raises RuntimeError
outside of a backward pass."""

AnyFuture: Any = _needed(torch._C, "Future")
"""The class of the futures that `Work.get_future()` returns; base class of `torch.futures.Future`."""

sparse_values: Callable[[torch.Tensor], torch.Tensor] = _needed(torch.Tensor, "_values")
"""The values of a sparse tensor. The public `values()` requires a coalesced tensor."""

sparse_indices: Callable[[torch.Tensor], torch.Tensor] = _needed(torch.Tensor, "_indices")
"""The indices of a sparse tensor. The public `indices()` requires a coalesced tensor."""


def run_after_backward(callback: Callable[[], None], within: Callable[[], None] | None = None) -> None:
    """Call `callback` at the end of the current backward pass, unless the pass ends in an exception.

    Call this at every bucket, because reentrant checkpointing runs inner backward passes. A callback queued in an inner
    pass is dropped at the end of that pass, and `within` is called instead. Outside of a backward pass, where `Join`
    shadows the collectives of other ranks, this does nothing.
    """

    def at_the_end() -> None:
        if current_autograd_node() is None:
            callback()
        elif within is not None:
            within()

    with contextlib.suppress(RuntimeError):
        queue_callback(at_the_end)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of `group` (public after torch 2.8). Raises HookRunError if there is none."""
    public = hasattr(group, "get_group_store")
    store: dist.Store | None = (
        group.get_group_store() if public else dist.distributed_c10d._get_process_group_store(group)
    )
    if store is None:
        raise HookRunError(
            f"this process group, a {type(group).__name__}, has no store, through which the ranks agree on a joint "
            "save: use save_residual='per_rank' or 'drop', or make a subclass whose get_group_store() returns one"
        )
    return store


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout for collectives of `group` on `device`; None if unknown."""
    backend_on = getattr(group, "_get_backend", None)
    with contextlib.suppress(RuntimeError):  # a backend without options
        return getattr(getattr(backend_on and backend_on(device), "options", None), "_timeout", None)
    return None


def is_torchcomms(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of `group` for `device` is torchcomms; False if unknown."""
    backend_on = getattr(group, "_get_backend", None)
    with contextlib.suppress(RuntimeError):  # no backend for this device
        return type(backend_on and backend_on(device)).__module__.split(".")[0] == "torchcomms"
    return False


def groups_here() -> int:
    """Return the number of process groups of which this rank is a member."""
    return len(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", ()))


def address_key(rank: int) -> str:
    """Return the key under which `ProcessGroupGloo` stores the address of a rank."""
    return f"0/{rank}"


def ddp_under(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model inside a module that was replicated by `torch.distributed._composable.replicate`; None for
    other modules. `replicate` creates it in the first forward pass; this function creates it earlier if needed."""
    used: Any = sys.modules.get("torch.distributed._composable.replicate")
    if used is None or not isinstance(model, used.DDP):
        return None
    state: Any = used.replicate.state(model)
    if not state.has_initialized:
        state.lazy_init()
    found: DistributedDataParallel = state._ddp
    return found


def joined_with_uneven_division(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP runs under `Join(divide_by_initial_world_size=False)`."""
    return getattr(ddp_model, "_divide_by_initial_world_size", True) is False


def in_join(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP runs under `Join`, as in `ddp_model.join()`."""
    return bool(getattr(getattr(ddp_model, "_join_config", None), "enable", False))


def has_optimizer_in_backward(parameter: torch.Tensor) -> bool:
    """Whether an optimizer is applied to `parameter` within the backward pass."""
    return hasattr(parameter, "_in_backward_optimizers")


def count_accumulate_hooks(parameter: torch.Tensor) -> int:
    """Count the hooks registered by `parameter.register_post_accumulate_grad_hook`."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def delays_all_reduce(ddp_model: DistributedDataParallel) -> bool:
    """Whether DDP was given `delay_all_reduce_named_params`."""
    return bool(getattr(ddp_model, "_delay_all_reduce_params", None))


def all_reduces(unit: FSDPModule) -> bool:
    """Whether `unit` takes part in all-reduces: `set_requires_all_reduce(False)` turns them off."""
    state = getattr(unit, "_get_fsdp_state", lambda: None)()
    return bool(getattr(getattr(state, "_fsdp_param_group", None), "all_reduce_grads", True))


def compiled_from(model: object) -> nn.Module | None:
    """Return the module that `torch.compile` wraps in `model`, or None."""
    inner: nn.Module | None = getattr(model, "_orig_mod", None)
    return inner
