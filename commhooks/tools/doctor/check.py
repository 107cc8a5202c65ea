"""Check, before the doctor measures, that the model and `batch_fn` can be measured on every rank."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commhooks.comm.collectives import gather_texts
from commhooks.compressors.cast import Noop
from commhooks.errors import DoctorError
from commhooks.gradients.torch_private import delays_all_reduce
from commhooks.hook.attach import attach
from commhooks.request import why_not_called
from commhooks.tools.doctor.copies import copy_of

BatchFn = Callable[[DistributedDataParallel], torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
"""Of the parameters of a model in their order, on the CPU."""

CONTRACT = (
    "batch_fn(model) makes a batch, calls the model that it is given (a copy of yours) and returns the loss, a tensor "
    "with one number"
)


def check_model(ddp_model: object) -> None:
    """Raise DoctorError unless `ddp_model` is a DDP model that can be copied, in a group of several ranks."""
    if not dist.is_initialized():
        raise DoctorError(
            "no process group: the doctor measures on the ranks and the network of a training; start it with torchrun, "
            "and from Python call torch.distributed.init_process_group first"
        )
    if not isinstance(ddp_model, DistributedDataParallel):
        raise DoctorError(
            f"expected a torch.nn.parallel.DistributedDataParallel model, got a {type(ddp_model).__module__}."
            f"{type(ddp_model).__qualname__}; wrap the model first (and torch.compile it afterwards)"
        )
    if ddp_model.mixed_precision is not None:
        raise DoctorError(
            "DistributedDataParallel(mixed_precision=...) occupies the communication hook, so no other hook can be "
            "tried; use autocast for mixed precision"
        )
    if delays_all_reduce(ddp_model):
        raise DoctorError("DistributedDataParallel(delay_all_reduce_named_params=...) cannot be measured")
    if not any(parameter.requires_grad for parameter in ddp_model.module.parameters()):
        raise DoctorError("every parameter of this model is frozen: there are no gradients to exchange")
    check_world_size(ddp_model.process_group)


def check_world_size(group: dist.ProcessGroup | None) -> None:
    """Raise DoctorError if the group has only one rank."""
    if dist.get_world_size(group) == 1:
        raise DoctorError(
            "one rank only: there is nothing to exchange, and nothing to compress. Start as many ranks as the training "
            "will have, on its machines"
        )


def gradients_of(module: torch.nn.Module) -> Gradients:
    return [None if each.grad is None else each.grad.to("cpu", copy=True) for each in module.parameters()]


def check_batch_fn(ddp_model: DistributedDataParallel, batch_fn: BatchFn) -> Gradients:
    """Run `batch_fn` once on a copy of the model, without communication in it. All ranks must call this.

    Returns:
        The gradients of this rank.

    Raises:
        DoctorError: on all ranks, if `batch_fn` fails on any of them.
    """
    group = ddp_model.process_group
    device = next(p.device for p in ddp_model.module.parameters() if p.requires_grad)
    trial = copy_of(ddp_model, alone=True)
    attach(trial, Noop(), process_group=group).quiet()
    problem: DoctorError | None = None
    own = works = "it works"
    try:
        _try(ddp_model, trial, batch_fn)
    except DoctorError as error:
        problem, own = error, str(error).encode(errors="backslashreplace").decode()
    texts = gather_texts(own, group, device, "whether batch_fn works")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text != works:
            raise DoctorError(f"rank {rank} cannot go on: {text}")
    return gradients_of(trial.module)


def _try(ddp_model: DistributedDataParallel, trial: DistributedDataParallel, batch_fn: BatchFn) -> None:
    if reason := why_not_called(batch_fn, trial):
        raise DoctorError(f"batch_fn cannot be called with one argument ({reason}). {CONTRACT}")

    def not_this_one(module: torch.nn.Module, arguments: Any) -> None:
        raise DoctorError(f"batch_fn called your own model instead of the copy that it was given. {CONTRACT}")

    guards = [module.register_forward_pre_hook(not_this_one) for module in (ddp_model, ddp_model.module)]
    try:
        loss: object = batch_fn(trial)
        if not isinstance(loss, torch.Tensor):
            raise DoctorError(f"batch_fn returned a {type(loss).__name__}. {CONTRACT}")
        if loss.numel() != 1:
            raise DoctorError(f"batch_fn returned a tensor of shape {tuple(loss.shape)}. {CONTRACT}")
        if not loss.requires_grad:
            without = "a tensor without a gradient (was it detached, or computed under no_grad?)"
            raise DoctorError(f"batch_fn returned {without}. {CONTRACT}")
        loss.backward()
    except DoctorError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DoctorError(
            f"batch_fn or the backward pass of its loss raised {type(error).__name__}: {error} "
            f"({place.filename}, line {place.lineno}). {CONTRACT}"
        ) from error
    finally:
        for guard in guards:
            guard.remove()
    if all(p.grad is None for p in trial.module.parameters()):
        raise DoctorError(
            f"the loss of batch_fn does not depend on the parameters of the model that it was given. {CONTRACT}"
        )
