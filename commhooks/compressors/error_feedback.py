"""Error feedback for the parameters of a bucket; follows the loss scale and does not synchronise with accelerators.

The part of `delta = gradient + residual` that a compressor does not send becomes the residual of the next step
(Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD, ICML 2019).
"""

from collections.abc import Sequence

import torch

from commhooks.compressors.base import State, StepInfo
from commhooks.gradients.layout import Slot
from commhooks.gradients.precision import compute_dtype


def with_residual(slot: Slot, flat: torch.Tensor, state: State, step: StepInfo) -> torch.Tensor:
    """Gradient plus residual of one parameter: a new 1-D float32 tensor (float64 for float64 gradients) in memory
    order."""
    delta = slot.of(flat).to(compute_dtype(flat.dtype), copy=True)
    residual = state["residual"].get(slot.name)
    if residual is None:
        return delta
    if isinstance(step.residual_factor, torch.Tensor):
        return delta.addcmul_(residual, step.residual_factor)
    return delta.add_(residual, alpha=step.residual_factor)


def clear_flags_of_unused(slots: Sequence[Slot], flags: torch.Tensor, step: StepInfo) -> None:
    """Set to 0 the flags (see `put_flags`) of the parameters whose gradient is an old one: what no rank uses keeps its
    residual, because DDP drops the result."""
    for slot, flag in zip(slots, flags, strict=True) if step.unused else ():
        if slot.name in step.unused:
            flag.zero_()


def keep_residual(slot: Slot, left: torch.Tensor, good: torch.Tensor | bool, state: State) -> None:
    """Store `left` as the residual of one parameter if `good`, the answer to `Verdict`, is true; else keep the old one.

    `left` has the shape and dtype of the result of `with_residual`. Call it after the `Verdict`, for every compressed
    parameter.
    """
    old = state["residual"].get(slot.name)
    if isinstance(good, bool):
        if good:
            state["residual"][slot.name] = left
        return
    state["residual"][slot.name] = torch.where(good, left, 0.0 if old is None else old)
