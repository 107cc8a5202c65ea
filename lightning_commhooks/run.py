"""What a strategy asks its trainer for a hook: the length of the run, and the loss scale."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from commhooks import HookConfigError
from commhooks.hook.for_plugins import HookRequest, LossScale, scale_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


def with_start(request: HookRequest, trainer: "pl.Trainer") -> HookRequest:
    """`request` with its start as a number of steps.

    Raises:
        HookConfigError: it is a fraction of a run of unknown length.
    """
    config = request.config
    if config is None or isinstance(config.configured_start, int):
        return request
    steps, option = steps_left(trainer), config.start_option
    if steps is None and config.configured_start is not None:
        raise HookConfigError(
            f"{option}={config.configured_start!r} is a fraction of the run, whose length the "
            "Trainer does not know (max_epochs=-1, or a data set without length): set max_steps in the Trainer, or "
            f"give {option} as an int, a number of steps"
        )
    return dataclasses.replace(request, config=config.resolved(steps))


def steps_left(trainer: "pl.Trainer") -> int | None:
    """Number of synchronised backward passes from here to the end of the run; None if unknown.

    Automatic optimisation has one per optimizer step, also with gradient accumulation. Manual optimisation: only the
    number of batches is known, and one pass per batch is assumed.
    """
    # -1 for a data set without length, inf for max_epochs=-1; the steps of an earlier fit are subtracted.
    total = trainer.estimated_stepping_batches
    if trainer.lightning_module.automatic_optimization:
        left = total - trainer.global_step
    else:
        # Here `global_step`, and therefore max_steps, counts the steps of all optimizers; the estimate is in batches.
        left = total - (trainer.fit_loop.epoch_loop.total_batch_idx + 1)
        if trainer.max_steps != -1:
            left = min(left, trainer.max_steps - trainer.global_step)
    return int(left) if 1 <= left < math.inf else None


def loss_scale(plugin: Any, device: torch.device) -> Callable[[], LossScale] | None:
    """Returns the current scale of the GradScaler of a precision plugin (of a Trainer or Fabric); None without one."""
    if getattr(plugin, "scaler", None) is None:
        return None
    return lambda: scale_of(plugin.scaler, device)
