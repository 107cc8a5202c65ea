"""What is known of a model that an accelerator has prepared: its hook, the accelerator and the loss scale. All
references are weak."""

import sys
import weakref
from collections.abc import Callable

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook
from commhooks.hook.for_plugins import LossScale, ScaleOf, compiled_from


class HookedModel:
    """A wrapped model and its hook, which lives as long as the model.

    Attributes:
        is_sharded: by FSDP2; else the model is wrapped in DDP.
        strict: whether loading the state of another hook is an error.
    """

    def __init__(self, model: torch.nn.Module, hook: CommHook, strict: bool) -> None:
        self.is_sharded, self.strict = isinstance(model, FSDPModule), strict
        self._model = weakref.ref(model)
        self._module = weakref.ref(unwrapped(model))
        self._hook = weakref.ref(hook)

    @property
    def hook(self) -> CommHook | None:
        """The hook; None if its model was deleted, or the hook was detached."""
        hook = self._hook()
        return None if self._model() is None or hook is None or hook.detached else hook

    @property
    def module(self) -> torch.nn.Module | None:
        """The module inside, which may outlive a DDP model; None if it was deleted."""
        return self._module()

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether `model` is the wrapped model, the module inside it, or a compiled form of one of them."""
        inner = _not_compiled(model)
        return self.hook is not None and (inner is self._model() or inner is self.module)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The original module in `model`, whether it is compiled, wrapped in DDP, or both."""
    inner = _not_compiled(model)
    return _not_compiled(inner.module) if isinstance(inner, DistributedDataParallel) else inner


def calling_accelerator(handler: DistributedDataParallelKwargs) -> Accelerator | None:
    """The accelerator that is calling `handler.register_comm_hook`.

    Accelerate 1.15 passes only the model, so the accelerator is searched in the callers' frames: `prepare_model` is one
    of its methods.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Accelerator) and caller.ddp_handler is handler:
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def accelerator_in_construction() -> tuple[Accelerator | None, bool]:
    """The accelerator whose constructor has called the caller of this function, and whether it has a plugin for FSDP.

    Accelerate 1.15 has set none of its attributes by then: both are variables of the constructor.
    """
    frame = sys._getframe(2)
    if frame.f_code is not Accelerator.__init__.__code__:
        return None, False
    return frame.f_locals["self"], frame.f_locals.get("fsdp_plugin") is not None


def loss_scale_of(accelerator: Accelerator | None) -> Callable[[], LossScale] | None:
    """Returns the current scale of the accelerator's GradScaler, 1 without one."""
    if accelerator is None:
        return None
    weak = weakref.ref(accelerator)

    # Looked up at each call, because it may be set later.
    return ScaleOf(lambda: getattr(weak(), "scaler", None), accelerator.device)


def _not_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """The original model of a model compiled by `torch.compile` or by Accelerate's regional compilation."""
    while (original := compiled_from(model)) is not None:
        model = original
    return model
