"""The gradients of some parameters of a bucket in blocks, with their residuals (error feedback)."""

from collections.abc import Sequence
from functools import cached_property

import torch

from commhooks.compressors.named_views import NamedViews
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.mean import Averaged
from commhooks.gradients import precision
from commhooks.gradients.layout import Slot
from commhooks.gradients.loss_scale import LossScale, chosen, is_one

Residuals = dict[str, torch.Tensor]


def put_flags(slots: Sequence[Slot], flat: torch.Tensor, flags: torch.Tensor) -> None:
    """Write to `flags` (uint8), per parameter, 1 if its gradient in the bucket's buffer is not zero, else 0. DDP may
    drop the result for a parameter that no rank used, and a residual sent in it would be lost."""
    on_host = precision.is_host_readable(flat.device)
    for i, slot in enumerate(slots):
        gradient = slot.of(flat)
        if on_host:
            # The first 64 elements nearly always contain a nonzero one.
            flags[i] = bool(gradient[:64].any()) or bool(gradient.any())
        else:
            flags[i].copy_(gradient.any())


class GradientBlocks:
    """Every parameter begins a new block, so that blocks do not depend on the bucket layout.

    Args:
        slots: the parameters, in the order of the blocks.
        delta: the blocks, `n x block_size`: gradient plus residual, then what rounding lost of it.
        error_feedback: keep residuals, flat in memory order, per parameter.

    Attributes:
        units: the name and the number of blocks of each parameter.
    """

    def __init__(
        self, slots: Sequence[Slot], code: BlockCode, delta: torch.Tensor, *, error_feedback: bool = True
    ) -> None:
        self.slots = slots
        self.delta = delta
        self.error_feedback = error_feedback
        counts = [code.blocks_of(slot.numel) for slot in slots]
        self.units = [(slot.name, count) for slot, count in zip(slots, counts, strict=True)]
        starts = [code.block_size * sum(counts[:i]) for i in range(len(counts))]
        self._spans = list(zip(slots, starts, strict=True))
        ends = [at + code.block_size * count for at, count in zip(starts, counts, strict=True)]
        filled = [at + slot.numel for slot, at in self._spans]
        self._padding = [(begin, end) for begin, end in zip(filled, ends, strict=True) if begin < end]
        self._parameter_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        self._parameter_of = self._parameter_of.to(delta.device)

    @cached_property
    def residual_blocks(self) -> torch.Tensor:
        return torch.zeros_like(self.delta)

    @cached_property
    def _residual_views(self) -> NamedViews:
        """The residuals of the parameters, in `residual_blocks`."""
        names = [(slot.name, at, (slot.numel,)) for slot, at in self._spans]
        return NamedViews(names, self.residual_blocks.view(-1))

    def form_delta(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        """delta = gradient + factor * residual. `flat`: the bucket's buffer."""
        delta = self.delta.view(-1)
        before = self._residual_views.gather(residuals) if self.error_feedback else None
        if before is not None and not is_one(factor):
            before = torch.mul(before, factor, out=delta)
        for slot, at in self._spans:
            gradient, here = slot.of(flat), slice(at, at + slot.numel)
            if before is None:
                delta[here].copy_(gradient)
            else:
                torch.add(before[here], gradient, out=delta[here])
        for begin, end in self._padding:
            delta[begin:end].zero_()

    def commit(
        self,
        averaged: Averaged,
        flat: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: torch.Tensor | bool,
    ) -> None:
        """Keep what rounding lost as residuals where `good`, and write the averaged gradients into the bucket."""
        used = self.used(averaged.flags)
        self.keep_lost(residuals, factor, good, used)
        self.write(averaged.decode(self.delta), used, flat)

    def used(self, flags: torch.Tensor) -> torch.Tensor | None:
        """Which blocks belong to a parameter that has a gradient on some rank (bool, `n x 1`); None: all, as far as the
        host knows. `flags`: those of all ranks."""
        has_gradient = flags > 0
        if precision.is_host_readable(flags.device) and bool(has_gradient.all()):
            return None
        return has_gradient.index_select(0, self._parameter_of).unsqueeze(1)

    def keep_lost(
        self, residuals: Residuals, factor: LossScale, good: torch.Tensor | bool, used: torch.Tensor | None
    ) -> None:
        """What is in `delta` becomes the residual, where `good` and `used`. A parameter without a gradient on any rank
        keeps its residual."""
        if good is False or not self.error_feedback:
            return
        self._residual_views.bind(residuals)
        before, left = self.residual_blocks, self.delta
        if good is True and used is None:
            before.copy_(left)
            return
        # Residuals that stay take the new loss scale only if the step is committed.
        factor = chosen(good, factor, 1.0)
        if not is_one(factor):
            before.mul_(factor)
        keep = torch.as_tensor(good, device=left.device) if used is None else used & good
        torch.where(keep, left, before, out=before)

    def write(self, mean: torch.Tensor, used: torch.Tensor | None, flat: torch.Tensor) -> None:
        """Write the averaged gradients `mean` (`n x block_size`, changed in place) into the bucket: zero unless
        `used`."""
        if used is not None:
            mean.masked_fill_(~used, 0)
        averaged = mean.view(-1)
        for slot, at in self._spans:
            slot.of(flat).copy_(averaged[at : at + slot.numel])
