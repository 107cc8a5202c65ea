"""The quantised mean with torch's operations, on any device. On an accelerator the host never waits for it."""

from collections.abc import Sequence

import torch

from commhooks.compressors.named_views import NamedViews
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.mean import Residuals
from commhooks.compressors.quantized.messages import Averaged, ShareMessages
from commhooks.gradients import precision
from commhooks.gradients.layout import Slot
from commhooks.gradients.loss_scale import LossScale, chosen, is_one


class GradientBlocks:
    """The gradients of some parameters of a bucket in blocks, with their residuals (error feedback). Every parameter
    begins a new block, so that blocks do not depend on the bucket layout; the rest of its last block is zero.

    Args:
        slots: the parameters, in the order of the blocks.
        error_feedback: keep residuals.

    Attributes:
        tensors: the name and the number of blocks of each parameter.
        blocks: of all of them.
        residuals: `blocks x block_size`; None without error feedback.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        code: BlockCode,
        dtype: torch.dtype,
        device: torch.device,
        *,
        error_feedback: bool = True,
    ) -> None:
        self.slots = slots
        self.tensors = [(slot.name, code.blocks_of(slot.numel)) for slot in slots]
        counts, size = [count for _, count in self.tensors], code.block_size
        starts = [size * sum(counts[:i]) for i in range(len(counts))]
        self._spans = list(zip(slots, starts, strict=True))
        ends = [at + size * count for at, count in zip(starts, counts, strict=True)]
        self._padding = [(at + slot.numel, end) for (slot, at), end in zip(self._spans, ends, strict=True)]
        self._slot_of_block = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        self._slot_of_block = self._slot_of_block.to(device)
        self.blocks = sum(counts)
        self.residuals: torch.Tensor | None = None
        if error_feedback:
            self.residuals = torch.zeros(self.blocks, size, dtype=dtype, device=device)
            names = [(slot.name, at, (slot.numel,)) for slot, at in self._spans]
            self._views = NamedViews(names, self.residuals.view(-1))

    def form_delta(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale, delta: torch.Tensor) -> None:
        """delta (`blocks x block_size`) = gradient + factor * residual. `flat`: the bucket's buffer."""
        delta = delta.view(-1)
        before = None if self.residuals is None else self._views.gather(residuals)
        if before is not None and not is_one(factor):
            before = torch.mul(before, factor, out=delta)
        for slot, at in self._spans:
            gradient, here = slot.of(flat), slice(at, at + slot.numel)
            if before is None:
                delta[here].copy_(gradient)
            else:
                torch.add(before[here], gradient, out=delta[here])
        for begin, end in self._padding:
            if begin < end:
                delta[begin:end].zero_()

    def used(self, flags: torch.Tensor) -> torch.Tensor | None:
        """Which blocks belong to a parameter that has a gradient on some rank (bool, `blocks x 1`); None: all, as far
        as the host knows. `flags`: those of all ranks."""
        has_gradient = flags > 0
        if precision.is_host_readable(flags.device) and bool(has_gradient.all()):
            return None
        return has_gradient.index_select(0, self._slot_of_block).unsqueeze(1)

    def keep(
        self,
        lost: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: torch.Tensor | bool,
        used: torch.Tensor | None,
    ) -> None:
        """What is `lost` (`blocks x block_size`) becomes the residual, where `good` and `used`."""
        if good is False or self.residuals is None:
            return
        self._views.bind(residuals)
        if good is True and used is None:
            self.residuals.copy_(lost)
            return
        # Residuals that stay take the new loss scale only if the step is committed.
        factor = chosen(good, factor, 1.0)
        if not is_one(factor):
            self.residuals.mul_(factor)
        changes = torch.as_tensor(good, device=lost.device) if used is None else used & good
        torch.where(changes, lost, self.residuals, out=self.residuals)

    def write(self, mean: torch.Tensor, used: torch.Tensor | None, flat: torch.Tensor) -> None:
        """Write the averages `mean` (`blocks x block_size`, changed in place) into the bucket: zero unless `used`."""
        if used is not None:
            mean.masked_fill_(~used, 0)
        for slot, at in self._spans:
            slot.of(flat).copy_(mean.view(-1)[at : at + slot.numel])


class TorchKernel:
    """See `BlockKernel`. The blocks of `gradients` come first; those of other tensors are put and taken by the caller.

    Attributes:
        delta: `blocks + 1` rows; the last one is zero.
        lost: those of the gradients.
    """

    def __init__(self, messages: ShareMessages, rank: int, gradients: GradientBlocks) -> None:
        self.messages, self.rank, self.gradients = messages, rank, gradients
        code, device, rows = messages.code, messages.sent.device, len(messages.shares.places) + 1
        self.delta = torch.zeros(rows, code.block_size, dtype=messages.dtype, device=device)
        self.lost = self.delta[: gradients.blocks]
        self.codes = torch.zeros(rows, code.block_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(rows, dtype=messages.dtype, device=device)
        self._own: torch.Tensor | None = None
        """This rank's own part of its share, exact, divided by the number of ranks."""

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        self.gradients.form_delta(flat, residuals, factor, self.lost)

    def quantise(self, most: float) -> None:
        messages, shares, code = self.messages, self.messages.shares, self.messages.code
        self._own = self.delta.index_select(0, shares.blocks[self.rank]).div_(messages.world_size)
        code.quantise(self.delta[:-1], self.codes[:-1], self.scales[:-1], most)
        sent, places = messages.sections(messages.sent), shares.blocks.view(-1)
        sent.scales.copy_(self.scales.index_select(0, places).view_as(sent.scales))
        sent.codes.copy_(self.codes.index_select(0, places).view_as(sent.codes))

    def average(self, arrived: torch.Tensor, most: float) -> None:
        messages, shares, code = self.messages, self.messages.shares, self.messages.code
        own, self._own = self._own, None
        assert own is not None
        parts, mean = messages.sections(arrived), messages.sections(messages.mean)
        for other in range(messages.world_size):
            if other != self.rank:
                codes = parts.codes[other].view(-1, code.block_bytes)
                code.add_dequantised(codes, parts.scales[other] / messages.world_size, own)
        code.quantise(own, mean.codes.view(-1, code.block_bytes), mean.scales, most)
        count = shares.counts[self.rank]
        self.delta.index_copy_(0, shares.blocks[self.rank, :count], own[:count].mul_(messages.world_size))

    def decode(self, averaged: Averaged, out: torch.Tensor) -> torch.Tensor:
        """Write the averaged blocks to `out` (`blocks x block_size`) and return it."""
        code, places = self.messages.code, self.messages.shares.places
        codes = averaged.sections.codes.reshape(-1, code.block_bytes).index_select(0, places)
        return code.dequantise(codes, averaged.sections.scales.reshape(-1).index_select(0, places), out)

    def store(
        self,
        averaged: Averaged,
        flat: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: torch.Tensor | bool,
    ) -> None:
        used = self.gradients.used(averaged.flags)
        self.gradients.keep(self.lost, residuals, factor, good, used)
        self.gradients.write(self.decode(averaged, self.lost), used, flat)
