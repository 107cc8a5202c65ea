"""Attach a hook to a DDP model: from a checked request to a registered hook."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.counters import Counters
from commhooks.comm.hook_result import checked_future
from commhooks.comm.nodes import RanksPerNode, find_nodes
from commhooks.compressors.base import Compressor
from commhooks.compressors.config import HookConfig
from commhooks.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from commhooks.engine.hierarchy import Hierarchy
from commhooks.engine.session import Binding, Session
from commhooks.engine.session_state import SessionState
from commhooks.engine.state import LearnedState
from commhooks.errors import AttachError, HookConfigError
from commhooks.gradients.ddp import reduced_parameters, sparse_parameters
from commhooks.gradients.exclude import all_names, warn_if_unmatched
from commhooks.gradients.names import ModelNames
from commhooks.hook.comm_hook import CommHook
from commhooks.hook.learning_hook import LearningHook
from commhooks.hook.request import HookRequest
from commhooks.hook.request_check import Asked, check_requests, describe_model, describe_request
from commhooks.hook.runner import Runner
from commhooks.hook.stateless_hook import StatelessHook
from commhooks.hook.user_hook import UserHook

logger = logging.getLogger(__name__)

_WRAPPERS = {"fp16": fp16_compress_wrapper, "bf16": bf16_compress_wrapper}


def attach(
    ddp_model: DistributedDataParallel,
    hook: HookConfig | Callable[..., Any] | str,
    *,
    hook_options: Mapping[str, Any] | None = None,
    hook_state: Any = None,
    wrapper: str | None = None,
    save_residual: str = "per_rank",
    strict: bool = True,
    total_steps: int | None = None,
    check_every: int | None = None,
    ranks_per_node: RanksPerNode = None,
    process_group: dist.ProcessGroup | None = None,
    loss_scale: Callable[[], float | torch.Tensor] | None = None,
) -> CommHook:
    """Register a communication hook on a DDP model. Every rank of the model's process group must call this with equal
    arguments: the ranks compare their requests and their models in one small collective.

    Args:
        ddp_model: a `DistributedDataParallel` model that has no hook yet.
        hook: a config object (`PowerSGD(matrix_approximation_rank=4)`), a name (see `available_hooks()`), a path
            `"package.module:function"`, or a callable `(state, bucket) -> torch.futures.Future[torch.Tensor]`.
        hook_options: options of a hook given by name.
        hook_state: the state of a callable. It is saved and restored if it has `state_dict` and `load_state_dict`.
        wrapper: "fp16" or "bf16": make the hook communicate in that dtype. "int8" or "int4", for PowerSGD: quantise its
            factors, and with error feedback what it leaves uncompressed.
        save_residual: default of `state_dict(residual=)`: "per_rank" (this rank's own residuals, without
            communication), "mean" (over the ranks; all of them must save), "drop" (no residuals).
        strict: whether loading a state of another model is an error.
        total_steps: synchronised backward passes in the whole run, if known; determines `start_powerSGD_iter` if that
            is None or a fraction.
        check_every: compare the weights of all ranks before every `check_every`-th backward pass, the first included.
            If they differ, all ranks raise HookRunError with the names of the parameters. None: never. Each check reads
            all weights once.
        ranks_per_node: average exactly inside a node and compress between nodes only; every rank then compresses and
            keeps residuals for its share of the parameters. A number: so many consecutive ranks are a node. "auto":
            those that one launcher has started, or that have one host name. None: compress between all ranks. With
            one node, or one rank per node, there is nothing to divide.
        process_group: the group over which to average; None: the model's group.
        loss_scale: returns the current loss scale, e.g. `scaler.get_scale`; the residuals are rescaled when it changes.

    Returns:
        The registered hook: state_dict(), load_state_dict(), stats(), plan().

    Raises:
        HookConfigError: the arguments are invalid, or no rank's machine supports them.
        AttachError: the model cannot take a hook. Or, on all ranks: the ranks attach different hooks or have different
            models, the machines of some ranks do not support `fused=True`, or the nodes have different numbers of
            ranks.
        HookRunError: another rank has failed, or did not take part within the process group's timeout.
    """
    request = HookRequest.parse(
        hook,
        hook_options=hook_options,
        hook_state=hook_state,
        wrapper=wrapper,
        save_residual=save_residual,
        strict=strict,
        check_every=check_every,
        ranks_per_node=ranks_per_node,
    )
    return attach_request(
        ddp_model, request, total_steps=total_steps, process_group=process_group, loss_scale=loss_scale
    )


def attach_request(
    ddp_model: DistributedDataParallel,
    request: HookRequest,
    *,
    total_steps: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    loss_scale: Callable[[], float | torch.Tensor] | None = None,
) -> CommHook:
    """`attach` for a request that was checked before; see `attach`."""
    _check_model(ddp_model)
    check_total_steps(total_steps)
    if loss_scale is not None and not callable(loss_scale):
        raise HookConfigError(
            f"loss_scale={loss_scale!r}; expected a function that returns the factor of this step, for example "
            "scaler.get_scale, or None"
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise HookConfigError(
            f"process_group={process_group!r}; expected a torch.distributed.ProcessGroup that this rank belongs to, "
            "for example one of torch.distributed.new_group, or None for the model's own"
        )
    group = process_group if process_group is not None else ddp_model.process_group
    names = ModelNames(reduced_parameters(ddp_model), all_names(ddp_model.module))
    binding = Binding(names, lambda: group, loss_scale)
    compressor = request.new_compressor(total_steps)
    runner: Runner
    state: Any
    if compressor is None:
        runner, state = _runner_of_function(ddp_model, request, binding, group)
    else:
        _warn_if_never_reached(compressor, total_steps, group)
        runner, state = _runner_of_compressor(ddp_model, request, compressor, binding, group), None
    # All parameters may have been frozen after wrapping; `check_requests` finds out whether on all ranks.
    device = next(iter([*names.known().values(), *ddp_model.module.parameters()])).device
    described = describe_request(request, runner.options, loss_scale is not None)
    plan = [repr(row) for row in runner.plan().parameters]
    asked = Asked(described, describe_model(ddp_model), plan)
    choice = check_requests(asked, runner.offer(names.known()), group, device)
    if not names.known():
        raise AttachError(
            "no parameter of this model is reduced by DDP (all are frozen, ignored or delayed), so a communication "
            "hook would have nothing to do: leave out the hook, or unfreeze parameters before DDP wraps the model"
        )
    runner.compute_with(choice)
    nodes = find_nodes(request.ranks_per_node, group, device)
    if nodes is not None:
        runner.arrange(Hierarchy(nodes, names.known()))
    attached = CommHook(request, runner, ddp_model, names, group)
    try:
        ddp_model.register_comm_hook(state, attached._run)
    except RuntimeError as error:
        # torch 2.13: "register_comm_hook or register_builtin_comm_hook can only be called once."
        raise AttachError(
            f"this DistributedDataParallel model has a communication hook already, so {request.name!r} cannot be: "
            "DDP takes one hook for life; wrap the model anew to change it"
        ) from error
    if group.rank() == 0:
        for problem in runner.problems():
            logger.warning("%s", problem)
        if request.config is not None:
            warn_if_unmatched(request.config.excluded_globs, ddp_model.module)
    return attached


def _runner_of_compressor(
    ddp_model: DistributedDataParallel,
    request: HookRequest,
    compressor: Compressor[Any],
    binding: Binding,
    group: dist.ProcessGroup,
) -> Runner:
    sparse = sparse_parameters(ddp_model.module)
    if not compressor.transactional:
        return StatelessHook(request.name, compressor, binding.names, group, sparse)
    session = Session(compressor, binding, LearnedState.of(compressor.state_fields), Counters())
    return LearningHook(request.name, session, group, sparse)


def _runner_of_function(
    ddp_model: DistributedDataParallel, request: HookRequest, binding: Binding, group: dist.ProcessGroup
) -> tuple[Runner, Any]:
    """The runner of a hook `(state, bucket)`, and its state."""
    state, function = request.build(group)
    _check_signature(function, request.name)
    if request.wrapper is not None:
        function = _WRAPPERS[request.wrapper](function)
    if not isinstance(state, SessionState):
        return UserHook(request, state, function, binding.names, group), state
    state.bind(binding, ddp_model.module, function)

    def run(grad_bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return checked_future(function(state, grad_bucket), request.name)

    return LearningHook(request.name, state.session, group, sparse_parameters(ddp_model.module), run), state


def check_total_steps(total_steps: object) -> None:
    """Raise HookConfigError unless `total_steps` is None or a positive int."""
    if total_steps is None:
        return
    if not isinstance(total_steps, int) or isinstance(total_steps, bool) or total_steps < 1:
        raise HookConfigError(f"total_steps={total_steps!r}; expected a number of steps, 1 or more, or None")


def _check_model(ddp_model: object) -> None:
    if not isinstance(ddp_model, DistributedDataParallel):
        inner = getattr(ddp_model, "_orig_mod", None)
        if isinstance(inner, DistributedDataParallel):
            raise AttachError("attach the hook to the DistributedDataParallel model before torch.compile wraps it")
        raise AttachError(
            f"a communication hook needs a torch.nn.parallel.DistributedDataParallel model, got a "
            f"{type(ddp_model).__module__}.{type(ddp_model).__qualname__}; wrap the model first"
        )
    if ddp_model.mixed_precision is not None:
        raise AttachError(
            "DistributedDataParallel(mixed_precision=...) registers a communication hook of its own, and DDP takes one "
            "only; use autocast for mixed precision, or wrapper='fp16' or 'bf16' to send less"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp_model.module.parameters()):
        raise AttachError(
            "an optimizer applied in backward registers a communication hook of its own, and DDP takes one only; "
            "use an ordinary optimizer"
        )


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise HookConfigError(
            f"hook {name!r} cannot be called as hook(state, bucket): {error}. A hook takes its state and a GradBucket"
        ) from None
    except ValueError:  # a builtin without a signature
        return


def _warn_if_never_reached(compressor: Compressor[Any], total_steps: int | None, group: dist.ProcessGroup) -> None:
    start, option = compressor.start_step, compressor.config.start_option
    if total_steps is not None and option is not None and start >= total_steps and dist.get_rank(group) == 0:
        logger.warning(
            "%s begins after %s steps, but this run has only %s: nothing will be compressed. Set "
            "%s to a smaller number, or to a fraction of the run.",
            compressor.called,
            start,
            total_steps,
            option,
        )
