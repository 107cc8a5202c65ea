"""`attach`: register a hook with a model."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from commhooks.comm.groups import is_logging_rank
from commhooks.comm.nodes import RanksPerNode
from commhooks.engine.consensus import Binding
from commhooks.errors import (
    AttachError,
    HookConfigError,
    log_summary,
    logger_of,
    print_error_on_rank_zero,
)
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.names import warn_if_unmatched
from commhooks.gradients.source import GradientSource, held_weakly
from commhooks.hook.comm_hook import CommHook
from commhooks.hook.kinds import prepared
from commhooks.hook.protocol import Hook
from commhooks.hook.request_check import check_arrangement, check_on_all_ranks
from commhooks.hook.sources import source_for
from commhooks.options import HookConfig, check_choice
from commhooks.request import SAVE_RESIDUAL, HookRequest, arguments_in, suggests_arguments

if TYPE_CHECKING:
    from commhooks.members.options import Torchft
    from commhooks.sharded.options import Shards

logger = logger_of(__name__)


@suggests_arguments
def attach(
    ddp_model: torch.nn.Module,
    hook: HookConfig | Callable[..., Any] | str | None,
    *,
    hook_options: Mapping[str, Any] | None = None,
    hook_state: Any = None,
    wrapper: str | None = None,
    save_residual: str = "auto",
    strict: bool = True,
    total_steps: int | None = None,
    check_every: int | None = None,
    ranks_per_node: RanksPerNode = None,
    members: "Torchft | str | None" = None,
    process_group: dist.ProcessGroup | None = None,
    replicate_group: DeviceMesh | dist.ProcessGroup | None = None,
    shards: "Shards | str | None" = None,
    loss_scale: Callable[[], float | torch.Tensor] | None = None,
) -> CommHook:
    """Register a communication hook with a model in DDP or one sharded by `fully_shard` (FSDP2).

    Every rank of the model must call this with equal arguments. The ranks compare their arguments
    and models in one small collective.

    Args:
        ddp_model: a `DistributedDataParallel` model without a hook, or a root module sharded by
            `fully_shard` over a one-dimensional mesh, with its parameters on their device. `DiLoCo`
            and `LocalSGD` also take an unwrapped module, for one process per machine.
        hook: a config object such as `PowerSGD(matrix_approximation_rank=4)`, a name ("powerSGD",
            see `available_hooks()`), a path `"package.module:function"`, or a callable
            `(state, bucket) -> torch.futures.Future[torch.Tensor]`. None, "none" or "off": no hook,
            for comparisons. DDP then averages the gradients itself; the gradients of a model
            sharded by `fully_shard` are averaged by a plain all-reduce.
        hook_options: options for a hook given by name.
        hook_state: the state of a callable. It is saved and restored if it has `state_dict` and
            `load_state_dict`.
        wrapper: communicate in float16 or bfloat16 ("fp16", "bf16").
        save_residual: default of `state_dict(residual=)`: "per_rank" (this rank's own residuals,
            without communication), "mean" (over the ranks, which must all save), "drop" (no
            residuals), "distributed" (the mean, in a form for `torch.distributed.checkpoint`).
            "auto": "per_rank", or "distributed" for a model sharded by `fully_shard`, for which
            only "distributed" and "drop" are valid.
        strict: whether loading the state of another hook or model is an error. If False, mismatched
            parameters start without learned state, with one warning.
        total_steps: synchronised backward passes in the whole run, if known; needed if
            `start_powerSGD_iter` is a fraction of the run, and used if it is None.
        check_every: before every `check_every`-th backward pass, beginning with the first, read all
            weights and compare them over the ranks. If they differ, all ranks raise HookRunError
            with the names of the parameters. None: never.
        ranks_per_node: average exactly inside a node and compress between nodes only; every rank
            compresses its share of the parameters. A number: that many consecutive ranks form a
            node. "auto": ranks started by the same launcher form a node, or ranks with the same
            host name. None: compress between all ranks; the hook `auto` then tries machines as
            nodes. No effect with one node, or one rank per node. Warns if it exceeds the world
            size.
        members: for `DiLoCo` and `LocalSGD`: machines come and go during the run, and `ddp_model`
            spans the ranks of one machine. "torchft", or a `Torchft` with options;
            None: all ranks are there from the start. Without a process group it makes a group of
            this process alone.
        process_group: the group over which to average a DDP model; None: the model's group.
        replicate_group: for a model sharded by `fully_shard`: the group or one-dimensional mesh
            over which to average, that is, the ranks that hold the same shard, such as
            `mesh["replicate"]`. With `members` it may be None: each machine has one replica.
        shards: for a model sharded by `fully_shard`: what FSDP2's own all-gather and reduce-scatter
            send. "int8", "bf16", or a `Shards` with options. With `hook=None` it needs no
            `replicate_group`. None: as FSDP2 sends it.
        loss_scale: a function that returns the current loss scale, e.g. `scaler.get_scale`. The
            residuals are rescaled when it changes.

    Returns:
        The registered hook, with state_dict(), load_state_dict(), stats(), plan().

    Raises:
        HookConfigError: the arguments are invalid, or no rank's machine supports them.
        AttachError: the model cannot take a hook. On all ranks: the ranks attach different hooks or
            have different models, some ranks' machines do not support the hook, or the nodes have
            different numbers of ranks.
        HookRunError: a rank has failed, or did not take part within the process group's timeout.
    """
    check_choice("save_residual", save_residual, (*SAVE_RESIDUAL, "distributed", "auto"))
    form = {"distributed": "mean", "auto": "per_rank"}.get(save_residual, save_residual)
    request = HookRequest.parse(**arguments_in(locals()) | {"save_residual": form})
    if isinstance(ddp_model, FSDPModule) and save_residual not in ("auto", "distributed", "drop"):
        raise HookConfigError(
            f"save_residual={save_residual!r} with a model sharded by fully_shard; expected"
            " 'distributed' (the default), for torch.distributed.checkpoint, or 'drop'"
        )
    request = dataclasses.replace(request, distributed=save_residual == "distributed")
    return attach_request(
        ddp_model,
        request,
        process_group=process_group,
        replicate_group=replicate_group,
        loss_scale=loss_scale,
    )


@print_error_on_rank_zero()
@plain_mode()
def attach_request(
    model: torch.nn.Module,
    request: HookRequest,
    *,
    total_steps: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    replicate_group: DeviceMesh | dist.ProcessGroup | None = None,
    loss_scale: Callable[[], float | torch.Tensor] | None = None,
    on_unused: Callable[[str], None] | None = None,
    accumulates: Callable[[], bool] | None = None,
) -> CommHook:
    """Attach a hook for a checked request; see `attach`.

    Args:
        total_steps: None: the `total_steps` of the request.
        accumulates: for a model without a wrapper, which has no `no_sync`: returns whether the
            current backward pass only accumulates gradients and does not count.
        on_unused: called on the logging rank with the warning that the hook had no effect.
    """
    if loss_scale is not None and not callable(loss_scale):
        raise HookConfigError(
            f"loss_scale={loss_scale!r}; expected a function that returns the factor of this step,"
            " for example scaler.get_scale, or None"
        )
    total_steps = request.total_steps if total_steps is None else total_steps
    source = source_for(request, model, process_group, replicate_group, accumulates)
    check_arrangement(request, source)
    between_replicas = replicate_group is not None or not request.shards_alone
    if (request.off or request.shards_alone) and not source.from_ddp and between_replicas:
        request = request.as_plain_average()
    hook, state = _agreed_hook(request, source, loss_scale, total_steps)
    with contextlib.ExitStack() as undo:  # if the model takes no hook after all
        undo.callback(hook.close)
        shards = _shards_of(request, hook, source)
        undo.callback(lambda: None if shards is None else shards.detach())
        attached = CommHook(request, hook, source, shards)
        if not request.off:
            attached._register(state, on_unused)
        undo.pop_all()
    if not request.off and total_steps is not None:
        attached.will_end(total_steps)
    if is_logging_rank(source.group, source.shard_group):
        _log_attached(request, hook, source)
    return attached


def _agreed_hook(
    request: HookRequest,
    source: GradientSource,
    loss_scale: Callable[[], float | torch.Tensor] | None,
    total_steps: int | None,
) -> tuple[Hook, Any]:
    """Return the hook on which all ranks agree, and an object that must live as long as it."""
    shards = None if source.shard_group is None else held_weakly(source.shard_group)
    binding = Binding(source.names, held_weakly(source.group), loss_scale, shards)
    made = prepared(request, source, binding, total_steps)
    choice = check_on_all_ranks(request, made.compressor, source, loss_scale is not None)
    if not source.names.named_parameters():
        raise AttachError(source.nothing_to_reduce)
    return made.build(choice), made.state


def _log_attached(request: HookRequest, hook: Hook, source: GradientSource) -> None:
    if request.off:  # no hook will log a summary in the first backward pass
        ignored = f" ({' and '.join(request.ignored)} without effect)" if request.ignored else ""
        log_summary(f"{request.name}: no hook, DDP averages the gradients itself{ignored}")
    elif source.module is not None:
        for warning in hook.warnings():
            logger.warning("%s", warning)
        if request.config is not None:
            warn_if_unmatched(request.config.excluded_globs, source.module)
        if request.shards is not None:
            warn_if_unmatched(request.shards.exclude, source.module)


def _shards_of(request: HookRequest, hook: Hook, source: GradientSource) -> Any:
    if request.shards is None:
        return None
    from commhooks.hook.shards_hook import ShardsHook, attach_shards

    return hook.shards if isinstance(hook, ShardsHook) else attach_shards(request, source)
