"""Collect all private names of torch that commhooks uses.

docs/versions.md lists what happens if one is missing. Names without which nothing works are looked
up on import, and raise ImportError. The other names are for error messages: without them, an
unsupported set-up is not detected.
"""

import contextlib
import sys
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commhooks.errors import HookRunError

if TYPE_CHECKING:
    # slow to import, and `commhooks hooks` does not need it
    from torch.distributed.fsdp import FSDPModule


def _needed(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise ImportError(
            f"commhooks uses {where}.{name}, a private name that torch {torch.__version__} lacks:"
            " install a version of torch that docs/versions.md lists"
        ) from None


current_task: Callable[[], int] = _needed(torch._C, "_current_graph_task_id")
"""Return the id of this thread's backward pass, also in the callbacks at its end; -1 outside."""

current_autograd_node: Callable[[], Any] = _needed(torch._C, "_current_autograd_node")
"""Return the current node of the enclosing backward pass, in a callback at the end of a pass.

None in the outermost pass.
"""

queue_callback: Callable[[Callable[[], None]], None] = _needed(
    _needed(torch.autograd.Variable, "_execution_engine"), "queue_callback"
)
"""Call the argument at the end of this backward pass, as torch's optimizer_overlap_hooks.py does.

Raises RuntimeError outside of a backward pass.
"""

AnyFuture: Any = _needed(torch._C, "Future")
"""The class of what `Work.get_future()` returns, and base class of `torch.futures.Future`."""

sparse_values: Callable[[torch.Tensor], torch.Tensor] = _needed(torch.Tensor, "_values")
"""The values of a sparse tensor. The public `values()` requires a coalesced tensor."""

sparse_indices: Callable[[torch.Tensor], torch.Tensor] = _needed(torch.Tensor, "_indices")
"""The indices of a sparse tensor. The public `indices()` requires a coalesced tensor."""

CopyEach = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
copy_each: CopyEach = _needed(torch, "_foreach_copy_")
"""Copy each tensor of the second list into the one of the first, in few launches."""

profiler_is_on: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)
"""Whether a profiler runs in this thread. Without the name spans are recorded always."""


def run_after_backward(
    callback: Callable[[], None], within: Callable[[], None] | None = None
) -> None:
    """Call `callback` at the end of the current backward pass unless that ends in an exception.

    Call this at every bucket: reentrant checkpointing runs backward passes inside the backward
    pass, and a callback queued in an inner pass is dropped at its end, where `within` is called
    instead. Outside of a backward pass, where `Join` shadows the collectives of other ranks, this
    does nothing.
    """

    def at_the_end() -> None:
        if current_autograd_node() is None:
            callback()
        elif within is not None:
            within()

    with contextlib.suppress(RuntimeError):
        queue_callback(at_the_end)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the key-value store of `group` (public after torch 2.8).

    Raises HookRunError if there is none.
    """
    store: dist.Store | None
    if hasattr(group, "get_group_store"):
        store = group.get_group_store()
    else:
        store = dist.distributed_c10d._get_process_group_store(group)
    if store is None:
        raise HookRunError(
            f"this process group, a {type(group).__name__}, has no store, through which the ranks"
            " agree on a joint save: use save_residual='per_rank' or 'drop', or make a subclass"
            " whose get_group_store() returns one"
        )
    return store


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    backend_on = getattr(group, "_get_backend", None)
    with contextlib.suppress(RuntimeError):  # a backend without options
        return getattr(
            getattr(backend_on and backend_on(device), "options", None), "_timeout", None
        )
    return None


def is_torchcomms(group: dist.ProcessGroup, device: torch.device) -> bool:
    backend_on = getattr(group, "_get_backend", None)
    with contextlib.suppress(RuntimeError):  # no backend for this device
        return type(backend_on and backend_on(device)).__module__.split(".")[0] == "torchcomms"
    return False


def groups_here() -> int:
    return len(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", ()))


def address_key(rank: int) -> str:
    """Return the key under which `ProcessGroupGloo` stores the address of a rank."""
    return f"0/{rank}"


def ddp_under(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP model inside a module that `torch.distributed._composable` has replicated.

    None for other modules. The DDP model is created in the first forward pass, or here.
    """
    imported: Any = sys.modules.get("torch.distributed._composable.replicate")
    if imported is None or not isinstance(model, imported.DDP):
        return None
    state: Any = imported.replicate.state(model)
    if not state.has_initialized:
        state.lazy_init()
    ddp_model: DistributedDataParallel = state._ddp
    return ddp_model


def joined_with_uneven_division(ddp_model: DistributedDataParallel) -> bool:
    """Return whether DDP runs in `Join(divide_by_initial_world_size=False)`."""
    return getattr(ddp_model, "_divide_by_initial_world_size", True) is False


def in_join(ddp_model: DistributedDataParallel) -> bool:
    return bool(getattr(getattr(ddp_model, "_join_config", None), "enable", False))


def has_optimizer_in_backward(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_in_backward_optimizers")


def count_accumulate_hooks(parameter: torch.Tensor) -> int:
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def all_reduces(unit: "FSDPModule") -> bool:
    state = getattr(unit, "_get_fsdp_state", lambda: None)()
    return bool(getattr(getattr(state, "_fsdp_param_group", None), "all_reduce_grads", True))


class UnitOfFSDP(NamedTuple):
    """Describes a module to which `fully_shard` was applied, in the order of FSDP2's buffers.

    Attributes:
        parameters: the sharded parameters.
        policy: its `MixedPrecisionPolicy`.
        gather, scatter: the objects that run its collectives; None in a version without them.
        gathers: how often a step gathers all of the weights: twice if they are freed after the
            forward pass.
        regathers: how often a step gathers them among fewer ranks (`reshard_after_forward=N`).
    """

    parameters: list[nn.Parameter]
    policy: Any
    gather: Any
    scatter: Any
    gathers: int
    regathers: int


def unit_of_fsdp(
    unit: "FSDPModule", known: Collection[nn.Parameter], *, is_root: bool
) -> UnitOfFSDP | None:
    """Read what FSDP2 knows of a unit; None if it has no parameters. `known`: the parameters of the
    model now. `is_root`: FSDP2 (torch 2.13) does not free the root's weights by default, which it
    decides in the first forward pass.
    """
    state: Any = getattr(unit, "_get_fsdp_state", lambda: None)()
    group = getattr(state, "_fsdp_param_group", None)
    if group is None:
        return None
    now = set(map(id, known))
    if any(id(each.sharded_param) not in now for each in group.fsdp_params):
        group.lazy_init()  # parameters were replaced, as by load_state_dict(assign=True)
    freed_to, kept = (
        group.post_forward_mesh_info,
        getattr(state, "_auto_reshard_after_forward", False),
    )
    resharded = freed_to is not None and not (is_root and kept)
    smaller = resharded and freed_to != group.mesh_info
    return UnitOfFSDP(
        [each.sharded_param for each in group.fsdp_params],
        group.mp_policy,
        getattr(group, "_all_gather_comm", None),
        getattr(group, "_reduce_scatter_comm", None),
        gathers=2 if resharded and not smaller else 1,
        regathers=int(smaller),
    )


def compiled_from(model: object) -> nn.Module | None:
    inner: nn.Module | None = getattr(model, "_orig_mod", None)
    return inner
