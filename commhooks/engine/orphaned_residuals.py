"""Send what error feedback has left for parameters that are not compressed any more, with their next gradient.

A compressor that changes what it does leaves residuals behind, and so does one of whole buckets when DDP divides its
first bucket into others. They are gradients that were not applied yet.
"""

from collections.abc import Collection, Sequence

import torch

from commhooks.comm.collective import Send
from commhooks.compressors.base import Exchange, State, StepInfo, judged
from commhooks.compressors.error_feedback import clear_flags_of_unused
from commhooks.engine.state import LearnedState
from commhooks.gradients.layout import BucketLayout, Slot


def orphaned(layout: BucketLayout, compressed: Collection[str], state: LearnedState) -> list[Slot]:
    """The parameters of a bucket that have a residual and are not among the names in `compressed`."""
    residuals = state["residual"] if state.local else {}
    if not residuals or layout.sparse:
        return []
    return [slot for slot in layout.slots if slot.name in residuals and slot.name not in compressed]


def with_orphaned(
    exchange: Exchange, flat: torch.Tensor, slots: Sequence[Slot], state: State, step: StepInfo
) -> Exchange:
    """An exchange, not begun yet, of a bucket to which the residuals of `slots` are added first. They are
    deleted when the pass is committed; the host reads the verdict.

    Where no rank has a gradient the residual stays for another pass: DDP may drop the result for a parameter that no
    rank used. The ranks agree on that, so that the same residuals remain on all of them."""
    residuals, factor = state["residual"], step.residual_factor
    flags = torch.stack([slot.of(flat).any() for slot in slots]).to(torch.uint8)
    clear_flags_of_unused(slots, flags, step)
    flags = yield Send(flags, what="gradients that are not zero", op="max")
    sent = [slot for slot, has_gradient in zip(slots, flags.tolist(), strict=True) if has_gradient]
    for slot in sent:
        slot.of(flat).add_(residuals[slot.name] * factor)
    result, good = yield from judged(exchange)
    if bool(good):
        for slot in sent:
            residuals.pop(slot.name, None)
    return result
