"""Attaching a hook to a DDP model: from a checked request to a registered hook."""

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.checkpoint.saved_state import SimpleSavedState
from commhooks.compressors.config import HookConfig, PowerSGD, resolve_start
from commhooks.compressors.powersgd import fused_codec
from commhooks.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from commhooks.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from commhooks.errors import AttachError, HookConfigError
from commhooks.gradients.exclude import all_names, warn_if_unmatched
from commhooks.gradients.names import GivenNames
from commhooks.gradients.precision import check_one_device, compute_dtype
from commhooks.hook.comm_hook import CommHook
from commhooks.hook.request import FUNCTIONS, HookSpec
from commhooks.hook.request_check import check_requests, describe_model, describe_request

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
    process_group: dist.ProcessGroup | None = None,
    loss_scale: Callable[[], float | torch.Tensor] | None = None,
) -> CommHook:
    """Register a communication hook on a DDP model. Every rank of the model's group must do the same: the ranks compare
    what they ask for, and their models, in one small exchange.

    Args:
        ddp_model: a `DistributedDataParallel` model that has no hook yet.
        hook: a config object (`PowerSGD(matrix_approximation_rank=4)`), a name (see `available_hooks()`), a path
            `"package.module:function"`, or a callable `(state, bucket) -> torch.futures.Future[torch.Tensor]`.
        hook_options: options of a hook given by name.
        hook_state: the state of a callable. One with `state_dict` and `load_state_dict` is saved and restored.
        wrapper: "fp16" or "bf16": let the hook communicate in that dtype.
        save_residual: what `state_dict` saves of the residuals unless it is told otherwise: "per_rank" (this rank's
            own, without communication), "mean" (over the ranks; all of them must save), "drop".
        strict: whether loading a state of another model is an error.
        total_steps: synchronised backward passes in the whole run, if known; decides `start_powerSGD_iter` where that
            is None or a fraction.
        check_every: compare the weights of all ranks before every so many backward passes, the first included, and
            raise on all of them as soon as they differ, with the names of the parameters; None: never. It costs one
            reading of the weights each time.
        process_group: over which to average; None is the model's own group.
        loss_scale: returns the factor by which the loss is multiplied now, e.g. `scaler.get_scale`; the residuals
            follow it.

    Returns:
        The registered hook: state_dict(), load_state_dict(), stats(), plan().

    Raises:
        HookConfigError: the request itself is wrong, or cannot be met by the machine of any rank.
        AttachError: the model cannot take a hook, or the ranks attach different hooks or have different models, or
            some ranks' machines cannot do what `fused=True` asks for (on all ranks then).
        HookRunError: another rank does not come within the process group's timeout.
    """
    spec = HookSpec.parse(
        hook,
        hook_options=hook_options,
        hook_state=hook_state,
        wrapper=wrapper,
        save_residual=save_residual,
        strict=strict,
        check_every=check_every,
    )
    return attach_spec(ddp_model, spec, total_steps=total_steps, process_group=process_group, loss_scale=loss_scale)


def attach_spec(
    ddp_model: DistributedDataParallel,
    spec: HookSpec,
    *,
    total_steps: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    loss_scale: Callable[[], float | torch.Tensor] | None = None,
) -> CommHook:
    """`attach` for a request that has been checked before; see there."""
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
    names = GivenNames(reduced_parameters(ddp_model), all_names(ddp_model.module))
    config = spec.config
    state: Any
    if config is None:
        state, function = spec.build(group)
        if isinstance(state, PowerSGDState):
            _check_unshared(state, ddp_model)
        if isinstance(state, PowerSGDState) and state._registration is None:
            state._names = names
            state._loss_scale = loss_scale
            if state.process_group is None:
                state.process_group = group
    else:
        function = FUNCTIONS[config.hook_name]
        if isinstance(config, PowerSGD):
            config = resolve_start(config, total_steps)
            state = PowerSGDState.from_config(config, group, names, loss_scale)
            _warn_if_never_reached(config, total_steps, group)
        else:
            state = group if config.sends else None
    _check_signature(function, spec.name)
    if spec.wrapper is not None:
        function = _WRAPPERS[spec.wrapper](function)
    request = describe_request(spec, state, loss_scale is not None)
    cannot = _why_not_here(state, names)
    # Every parameter may have been frozen after the wrap; whether on all ranks is for the exchange to find out.
    device = next(iter([*names.known().values(), *ddp_model.module.parameters()])).device
    check_requests(request, describe_model(ddp_model), cannot, group, device)
    if not names.known():
        raise AttachError(
            "no parameter of this model is reduced by DDP (all are frozen, ignored or delayed), so a communication "
            "hook would have nothing to do: leave out the hook, or unfreeze parameters before DDP wraps the model"
        )
    attached = CommHook(spec, config, state, function, ddp_model, names, group)
    try:
        ddp_model.register_comm_hook(state, attached._run)
    except RuntimeError as error:
        # torch 2.13: "register_comm_hook or register_builtin_comm_hook can only be called once."
        raise AttachError(
            f"this DistributedDataParallel model has a communication hook already, so {spec.name!r} cannot be: "
            "DDP takes one hook for life; wrap the model anew to change it"
        ) from error
    if group.rank() == 0:
        _warn_if_useless(attached)
        if isinstance(state, PowerSGDState):
            warn_if_unmatched(state._options.exclude, ddp_model.module)
    return attached


def _why_not_here(state: Any, names: GivenNames) -> HookConfigError | None:
    """What keeps this machine from running what the options ask for. Other ranks may be better off: the answer goes
    into the exchange."""
    if not isinstance(state, PowerSGDState):
        return None
    try:
        check_one_device(parameter.device for parameter in names.known().values())
        if state._options.fused:
            for parameter in names.known().values():
                fused_codec.check_supported(parameter.device, compute_dtype(parameter.dtype))
            fused_codec.load()
    except HookConfigError as error:
        return error
    return None


def check_total_steps(total_steps: object) -> None:
    """Raise HookConfigError unless it is None or a positive number of steps."""
    if total_steps is None:
        return
    if not isinstance(total_steps, int) or isinstance(total_steps, bool) or total_steps < 1:
        raise HookConfigError(f"total_steps={total_steps!r}; expected a number of steps, 1 or more, or None")


def reduced_parameters(ddp_model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Names and parameters that DDP reduces, in registration order. `torch.compile`'s prefix is left out of the names,
    so that a checkpoint fits with and without it."""
    return [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in ddp_model.module.named_parameters()
        if parameter.requires_grad and name not in ddp_model.parameters_to_ignore
    ]


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


def _check_unshared(state: PowerSGDState, ddp_model: DistributedDataParallel) -> None:
    other = state._attached_to() if state._attached_to is not None else None
    if other is not None and other.module is not ddp_model.module:
        raise AttachError(
            "this PowerSGDState already serves another model: its memory is that of one model's gradients; make a "
            "PowerSGDState for each model"
        )
    state._attached_to = weakref.ref(ddp_model)


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise HookConfigError(
            f"hook {name!r} cannot be called as hook(state, bucket): {error}. A hook takes its state and a GradBucket"
        ) from None
    except ValueError:  # a builtin without a signature
        return


def _warn_if_never_reached(config: PowerSGD, total_steps: int | None, group: dist.ProcessGroup) -> None:
    start = config.start_powerSGD_iter
    assert isinstance(start, int)
    if total_steps is not None and start >= total_steps and dist.get_rank(group) == 0:
        logger.warning(
            "PowerSGD begins after %s steps, but this run has only %s: nothing will be compressed. Set "
            "start_powerSGD_iter to a smaller number, or to a fraction of the run.",
            start,
            total_steps,
        )


def _warn_if_useless(hook: CommHook) -> None:
    """Say once what the user would otherwise find out from the network's counters, or from a checkpoint."""
    if hook._low_rank is not None and not hook._batched and not hook.plan().compressed:
        logger.warning(
            "PowerSGD at rank %s compresses no parameter of this model: print(hook.plan()) says why for each.",
            hook._low_rank.matrix_approximation_rank,
        )
    if hook._config is not None or hook._state is None or isinstance(hook._state, dist.ProcessGroup):
        return
    if isinstance(hook._saved_state, SimpleSavedState) and not hook._saved_state.saves_state:
        logger.warning(
            "the state of hook %s (%s) has no state_dict and load_state_dict: checkpoints do not hold it.",
            hook.name,
            type(hook._state).__name__,
        )
