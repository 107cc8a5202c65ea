"""Read the loss scale, by which a GradScaler multiplies the loss; the host never waits for it."""

import math
import numbers
from collections.abc import Callable
from typing import overload

import torch

from commhooks.errors import HookRunError
from commhooks.gradients import precision

LossScale = float | torch.Tensor
"""A float, or a 0-dim tensor on an accelerator that the host has not read."""


class ScaleOf:
    """Returns the current scale of the GradScaler that `scaler()` returns; 1 for None.

    The GradScaler may be created later.
    """

    def __init__(
        self, scaler: Callable[[], torch.amp.GradScaler | None], device: torch.device
    ) -> None:
        self.scaler = scaler
        self._device = device

    def __call__(self) -> LossScale:
        scaler = self.scaler()
        if scaler is None:
            return 1.0
        if precision.is_host_readable(self._device):
            return scaler.get_scale()
        return scaler.scale(torch.ones((), device=self._device))


def scaler_of(loss_scale: Callable[[], LossScale] | None) -> torch.amp.GradScaler | None:
    if isinstance(loss_scale, ScaleOf):
        return loss_scale.scaler()
    owner = getattr(loss_scale, "__self__", None)
    return owner if isinstance(owner, torch.amp.GradScaler) else None


def read_scale(loss_scale: Callable[[], LossScale], before: LossScale) -> LossScale:
    """Return the loss scale of this backward pass.

    Raises HookRunError if it is not a number; or if it is on the host, and zero, negative or not
    finite. If it is on an accelerator, return the previous loss scale `before` in this case: the
    gradients of such a step are all zero or not finite, and the residuals must not change.
    """
    scale = loss_scale()
    if not isinstance(scale, numbers.Real) and not (
        isinstance(scale, torch.Tensor) and scale.numel() == 1
    ):
        raise HookRunError(
            f"loss_scale returned a {type(scale).__name__}; expected the factor by which the loss"
            " was multiplied: a number, or a tensor that holds one"
        )
    if isinstance(scale, torch.Tensor) and not precision.is_host_readable(scale.device):
        # `where` returns a copy, which is needed because the scaler changes its tensor in place.
        return torch.where(scale.isfinite() & (scale > 0), scale.detach(), before)
    scale = float(scale)
    if not (math.isfinite(scale) and scale > 0):
        raise HookRunError(
            f"loss_scale returned {scale}; expected the factor by which the loss was multiplied, a"
            " positive number. A GradScaler comes down to zero when every step overflows: look for"
            " the inf or NaN in the model"
        )
    return scale


@overload
def chosen(good: torch.Tensor | bool, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor: ...
@overload
def chosen(good: torch.Tensor | bool, new: LossScale, old: LossScale) -> LossScale: ...
def chosen(good: torch.Tensor | bool, new: LossScale, old: LossScale) -> LossScale:
    """Return `new` if `good`, else `old`. The result is a tensor only if `good` is on a device."""
    if isinstance(good, bool):
        return new if good else old
    if not isinstance(new, torch.Tensor) and not isinstance(old, torch.Tensor):
        if new == old:
            return new
        new = torch.full((), new, dtype=torch.float64, device=good.device)
    return torch.where(good, new, old)


def is_one(factor: LossScale) -> bool:
    """Return whether `factor` is the float 1. False for a tensor, which is not read."""
    return not isinstance(factor, torch.Tensor) and factor == 1
