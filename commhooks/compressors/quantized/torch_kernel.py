"""The quantised mean with torch's operations, on any device. On an accelerator the host never waits for it."""

import itertools
from collections.abc import Sequence

import torch

from commhooks.compressors.named_views import NamedViews
from commhooks.compressors.quantized.mean import Good, Residuals
from commhooks.compressors.quantized.messages import Averaged, ShareMessages
from commhooks.gradients import precision
from commhooks.gradients.layout import Slot
from commhooks.gradients.loss_scale import LossScale, chosen, is_one


class TorchKernel:
    """See `BlockKernel`.

    Args:
        slots: the tensors whose blocks are averaged.

    Attributes:
        delta: `blocks + 1` rows; the last one is zero. The end of the last block of each of `slots` is zero, too.
        residuals: of `slots`, in blocks; None without error feedback.
    """

    def __init__(self, messages: ShareMessages, rank: int, slots: Sequence[Slot], *, error_feedback: bool) -> None:
        self.messages, self.rank = messages, rank
        code, device, rows = messages.code, messages.sent.device, len(messages.shares.places) + 1
        self.delta = torch.zeros(rows, code.block_size, dtype=messages.dtype, device=device)
        self.codes = torch.zeros(rows, code.block_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(rows, dtype=messages.dtype, device=device)
        starts = list(itertools.accumulate((code.blocks_of(x.numel) * code.block_size for x in slots), initial=0))
        self.residuals: NamedViews | None = None
        if error_feedback:
            names = [(slot.name, start, (slot.numel,)) for slot, start in zip(slots, starts, strict=False)]
            self.residuals = NamedViews(names, torch.zeros(starts[-1], dtype=messages.dtype, device=device))
        self._spans = list(zip(slots, starts, starts[1:], strict=False))
        self._of_slots = self.delta[:-1]
        blocks = torch.tensor(starts).diff() // code.block_size
        self._slot_of_block = torch.arange(len(slots)).repeat_interleave(blocks).to(device)
        self._own: torch.Tensor | None = None

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        delta = self._of_slots.view(-1)
        before = None if self.residuals is None else self.residuals.gather(residuals)
        if before is not None and not is_one(factor):
            before = torch.mul(before, factor, out=delta)
        for slot, start, end in self._spans:
            gradient, here = slot.of(flat), slice(start, start + slot.numel)
            if before is None:
                delta[here].copy_(gradient)
            else:
                torch.add(before[here], gradient, out=delta[here])
            if here.stop < end:
                delta[here.stop : end].zero_()

    def quantise(self) -> None:
        messages, shares = self.messages, self.messages.shares
        self._own = self.delta.index_select(0, shares.blocks[self.rank]).div_(messages.world_size)
        messages.code.quantise(self.delta[:-1], self.codes[:-1], self.scales[:-1], messages.most)
        sent, order = messages.in_sent, shares.blocks.view(-1)
        sent.scales.copy_(self.scales.index_select(0, order).view_as(sent.scales))
        sent.codes.copy_(self.codes.index_select(0, order).view_as(sent.codes))

    def average(self, arrived: torch.Tensor) -> None:
        messages, shares, code = self.messages, self.messages.shares, self.messages.code
        own, self._own = self._own, None
        assert own is not None
        parts, mean = messages.sections(arrived), messages.in_mean
        for other in range(messages.world_size):
            if other != self.rank:
                codes = parts.codes[other].view(-1, code.block_bytes)
                code.add_dequantised(codes, parts.scales[other] / messages.world_size, own)
        code.quantise(own, mean.codes.view(-1, code.block_bytes), mean.scales, messages.most)
        count = shares.counts[self.rank]
        self.delta.index_copy_(0, shares.blocks[self.rank, :count], own[:count].mul_(messages.world_size))

    def store(
        self, averaged: Averaged, flat: torch.Tensor, residuals: Residuals, factor: LossScale, good: Good
    ) -> None:
        has_gradient, used = averaged.flags > 0, None
        if not (precision.is_host_readable(flat.device) and bool(has_gradient.all())):
            used = has_gradient.index_select(0, self._slot_of_block).unsqueeze(1)
        self._keep_lost(residuals, factor, good, used)
        code, places, sections = self.messages.code, self.messages.shares.places, averaged.sections
        codes = sections.codes.reshape(-1, code.block_bytes).index_select(0, places)
        mean = code.dequantise(codes, sections.scales.reshape(-1).index_select(0, places), self._of_slots)
        if used is not None:
            mean.masked_fill_(~used, 0)
        for slot, start, _ in self._spans:
            slot.of(flat).copy_(mean.view(-1)[start : start + slot.numel])

    def _keep_lost(self, residuals: Residuals, factor: LossScale, good: Good, used: torch.Tensor | None) -> None:
        """`used`: which blocks belong to a tensor with a flag (bool, `n x 1`); None: all, as far as the host knows."""
        if good is False or self.residuals is None:
            return
        lost = self._of_slots
        before = self.residuals.bind(residuals).view_as(lost)
        if good is True and used is None:
            before.copy_(lost)
            return
        # Residuals that stay take the new loss scale only if the step is committed.
        factor = chosen(good, factor, 1.0)
        if not is_one(factor):
            before.mul_(factor)
        keep = torch.as_tensor(good, device=lost.device) if used is None else used & good
        torch.where(keep, lost, before, out=before)
