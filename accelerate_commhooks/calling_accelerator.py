"""The accelerator that prepares a model, and its loss scale: Accelerate does not pass them to handlers."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator, DistributedDataParallelKwargs

from commhooks.hook.for_plugins import LossScale, scale_of


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


def loss_scale_of(accelerator: Accelerator | None) -> Callable[[], LossScale] | None:
    """Returns the current scale of the accelerator's GradScaler, 1 without one. Does not keep the accelerator."""
    if accelerator is None:
        return None
    weak = weakref.ref(accelerator)

    def loss_scale() -> LossScale:
        known: Any = weak()
        if getattr(known, "scaler", None) is None:  # checked at each call, because it may be set later
            return 1.0
        return scale_of(known.scaler, known.device)

    return loss_scale
