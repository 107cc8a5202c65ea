"""Error feedback for the parameters of a bucket; follows the loss scale and does not synchronise with accelerators.

The part of `delta = gradient + residual` that a compressor does not send becomes the residual of the next step
(Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD, ICML 2019).
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from commhooks.compressors.base import State, StepInfo
from commhooks.gradients.layout import Slot
from commhooks.gradients.precision import compute_dtype

Fill = Callable[[int], torch.Tensor]


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


class NamedViews:
    """One tensor whose pieces are the entries of a dict, so that learned state kept by name can be processed together.

    Args:
        names: per entry its name, its offset in `whole` and its shape.
        whole: the memory of the entries, 1-D.
    """

    def __init__(self, names: Sequence[tuple[str, int, tuple[int, ...]]], whole: torch.Tensor) -> None:
        self.whole = whole
        self._views = {name: whole[begin : begin + torch.Size(own).numel()].view(own) for name, begin, own in names}

    def gather(self, entries: Mapping[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """Copy `entries` into the whole tensor and return it. A missing entry i becomes `fill(i)`, or zeros. Does not
        change the dict."""
        for i, (name, view) in enumerate(self._views.items()):
            known = entries.get(name)
            if known is view:
                continue
            if known is not None:
                view.copy_(known)
            elif fill is not None:
                view.copy_(fill(i))
            else:
                view.zero_()
        return self.whole

    def bind(self, entries: dict[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """As `gather`, and replace each entry of the dict by its piece of the whole tensor."""
        whole = self.gather(entries, fill)
        entries.update(self._views)
        return whole
