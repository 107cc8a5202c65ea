"""Send what error feedback has left for parameters that are not compressed any more, with their next gradient.

A compressor that changes what it does leaves residuals behind. They are gradients that were not applied yet.
"""

from collections.abc import Sequence

import torch

from commhooks.comm.collective import Send
from commhooks.compressors.base import Exchange, State, StepInfo, Verdict
from commhooks.compressors.plan import UnitPlan
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.loss_scale import is_one


def leftovers(layout: BucketLayout, plans: Sequence[UnitPlan], state: State) -> list[Slot]:
    """The parameters of a bucket that have a residual and are not compressed."""
    residuals = state["residual"]
    if not residuals or layout.sparse or len(plans) != len(layout.slots):
        return []
    return [s for s, plan in zip(layout.slots, plans, strict=True) if not plan.compressed and s.name in residuals]


def with_leftovers(
    exchange: Exchange, flat: torch.Tensor, slots: Sequence[Slot], state: State, step: StepInfo
) -> Exchange:
    """`exchange`, not begun yet, of a bucket to which the residuals of `slots` are added first. They are deleted when
    the pass is committed; the host reads the verdict.

    Where no rank has a gradient the residual stays for another pass: DDP may drop the result for a parameter that no
    rank used. The ranks agree on that, so that the same residuals remain on all of them."""
    residuals, factor = state["residual"], step.residual_factor
    flags = torch.stack([slot.of(flat).any() for slot in slots]).to(torch.uint8)
    flags = yield Send(flags, "gradients that are not zero", op="max")
    used = dict(zip(slots, map(bool, flags.tolist()), strict=True))
    for slot in (each for each in slots if used[each]):
        slot.of(flat).add_(residuals[slot.name] * factor)
    answer = None
    while True:
        try:
            yielded = exchange.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield yielded
        if isinstance(yielded, Verdict) and bool(answer):
            for slot in slots:
                if used[slot]:
                    residuals.pop(slot.name, None)
                elif not is_one(factor):
                    residuals[slot.name].mul_(factor)
