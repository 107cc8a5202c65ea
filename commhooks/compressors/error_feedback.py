"""Error feedback for one parameter of a bucket: right with a loss scale, and without a wait on accelerators.

What a compressor does not send of `delta = gradient + residual` becomes the residual of the next step (Karimireddy,
Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD, ICML 2019).
"""

import torch

from commhooks.compressors.base import State, StepInfo
from commhooks.gradients.layout import Slot
from commhooks.gradients.loss_scale import is_one
from commhooks.gradients.precision import compute_dtype


def with_residual(slot: Slot, flat: torch.Tensor, state: State, step: StepInfo) -> torch.Tensor:
    """Gradient plus residual of one parameter: a new 1-D tensor in float32 (float64 stays float64), in memory order."""
    delta = slot.of(flat).to(compute_dtype(flat.dtype), copy=True)
    residual = state["residual"].get(slot.name)
    return delta if residual is None else delta.add_(residual * step.residual_factor)


def keep_residual(slot: Slot, left: torch.Tensor, good: torch.Tensor | bool, state: State, step: StepInfo) -> None:
    """Make `left` the residual of one parameter where the verdict is `good`; otherwise the old one stays.

    `left` has the shape and dtype of what `with_residual` gave. Call it after the `Verdict`, for every parameter that
    is compressed.
    """
    old = state["residual"].get(slot.name)
    if isinstance(good, bool):
        if good:
            state["residual"][slot.name] = left
        return
    # Whether the step is good or not: the loss scale that goes with the residuals changes with them.
    if old is None:
        old = torch.zeros_like(left)
    before = old if is_one(step.residual_factor) else old * step.residual_factor
    state["residual"][slot.name] = torch.where(good, left, before)
