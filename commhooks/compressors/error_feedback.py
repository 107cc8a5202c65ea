"""Implement error feedback: what is not sent of `delta = gradient + residual` is the next residual.

Source: Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD, ICML 2019. Residuals
follow the loss scale. Nothing here synchronises with an accelerator.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from commhooks.compressors.base import State, StepInfo
from commhooks.gradients.layout import Slot
from commhooks.gradients.precision import compute_dtype

Fill = Callable[[int], torch.Tensor]


def with_residual(slot: Slot, flat: torch.Tensor, state: State, step: StepInfo) -> torch.Tensor:
    """Return gradient plus residual of one parameter, as a new 1-D tensor in memory order.

    It is in float32 (float64 for float64 gradients).
    """
    delta = slot.of(flat).to(compute_dtype(flat.dtype), copy=True)
    residual = state["residual"].get(slot.name)
    if residual is None:
        return delta
    if isinstance(step.residual_factor, torch.Tensor):
        return delta.addcmul_(residual, step.residual_factor)
    return delta.add_(residual, alpha=step.residual_factor)


def clear_flags_of_unused(slots: Sequence[Slot], flags: torch.Tensor, step: StepInfo) -> None:
    """Set the flags (see `put_flags`) of the parameters in `step.unused` to 0.

    A parameter that no rank uses then keeps its residual, because DDP discards its result.
    """
    for slot, flag in zip(slots, flags, strict=True) if step.unused else ():
        if slot.name in step.unused:
            flag.zero_()


def keep_residual(slot: Slot, left: torch.Tensor, good: torch.Tensor | bool, state: State) -> None:
    """Store `left` as the residual of one parameter if `good` is true, else keep the old residual.

    Call this after the `Verdict`, for every compressed parameter.

    Args:
        left: what was not sent, in the shape and dtype that `with_residual` returns.
        good: the answer to the `Verdict`.
    """
    old = state["residual"].get(slot.name)
    if isinstance(good, bool):
        if good:
            state["residual"][slot.name] = left
        return
    state["residual"][slot.name] = torch.where(good, left, 0.0 if old is None else old)


class NamedViews:
    """Views one tensor as a dict of tensors, so that one operator processes many parameters.

    `entries`: the name, the offset in `whole` (1-D) and the shape of each entry.
    """

    def __init__(
        self, entries: Sequence[tuple[str, int, tuple[int, ...]]], whole: torch.Tensor
    ) -> None:
        self.whole = whole
        self._views = {
            name: whole[begin : begin + math.prod(shape)].view(shape)
            for name, begin, shape in entries
        }

    def gather(self, entries: Mapping[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """Copy `entries` into `whole`, and return it.

        A missing entry i becomes `fill(i)`, or zeros without `fill`.
        """
        for i, (name, view) in enumerate(self._views.items()):
            entry = entries.get(name)
            if entry is view:
                continue
            if entry is not None:
                view.copy_(entry)
            elif fill is not None:
                view.copy_(fill(i))
            else:
                view.zero_()
        return self.whole

    def bind(self, entries: dict[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """Call `gather`, and replace the tensors in `entries` by views of `whole`."""
        whole = self.gather(entries, fill)
        entries.update(self._views)
        return whole
