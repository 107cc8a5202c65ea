"""PowerSGD's messages, quantised: the wrappers "int8" and "int4".

The factors and the gradients that PowerSGD does not compress become blocks of small integers with a scale each, and the
quantised mean (`quantized/mean.py`) takes the place of the all-reduce. What is lost on the way comes back:

    Q           the residual is formed from this rank's Q less what was lost of it. The mean of these over the ranks is
                the Q that all receive, so the mean residual is exact.
    P           all ranks receive the same bits, and any P does: its basis is formed after it has arrived.
    all others  have residuals of their own, as in the quantised hooks.
"""

from collections.abc import Callable, Sequence

import torch

from commhooks.compressors.base import StepInfo
from commhooks.compressors.powersgd.message import Averaging, Contents, Message, Messages, Residuals
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.gradient_blocks import GradientBlocks, put_flags
from commhooks.compressors.quantized.mean import Averaged, QuantisedMean
from commhooks.compressors.quantized.mean_buffers import MeanContents, Numbers
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.precision import compute_dtype


class QuantisedMessages(Messages):
    """Makes the messages of one bucket layout. Their dtype is the compute dtype: they are quantised on the way.

    Args:
        code: how blocks are quantised. Every factor and every parameter begins a new block.
        beside: the parameters that are quantised as they are, with error feedback.
        plain_dtype: the dtype in which other uncompressed gradients travel.
        largest: numbers beyond it are clamped; error feedback keeps the rest.
    """

    def __init__(
        self, layout: BucketLayout, code: BlockCode, beside: Sequence[Slot], plain_dtype: torch.dtype, largest: float
    ) -> None:
        super().__init__(compute_dtype(layout.dtype), layout.device)
        self.beside = beside
        self.code = code
        self.plain_dtype = plain_dtype
        self.largest = largest
        self.gradients = GradientBlocks(beside, code, self.new_blocks(sum(code.blocks_of(x.numel) for x in beside)))

    def numel(self, contents: Contents) -> int:
        return super().numel(contents) + 1

    def new(self, contents: Contents, buffer: torch.Tensor | None = None) -> "QuantisedMessage":
        buffer = self.new_buffer(self.numel(contents)) if buffer is None else buffer
        return QuantisedMessage(self, contents, buffer)

    def new_blocks(self, count: int) -> torch.Tensor:
        return torch.zeros(count, self.code.block_size, dtype=self.dtype, device=self.device)


class QuantisedMessage(Message):
    """One message. The blocks of the gradients beside come first, then those of the factors.

    The last element of the buffer is NaN after the sum if anything that has arrived is not finite, else 0.
    """

    def __init__(self, messages: QuantisedMessages, contents: Contents, buffer: torch.Tensor) -> None:
        super().__init__(contents, buffer)
        self._bad = buffer[-1]
        self._messages = messages
        self._gradients = messages.gradients if contents.flags else None
        code, factors = messages.code, [(name, rank * length) for name, (rank, length) in contents.factors]
        beside = [] if self._gradients is None else self._gradients.units
        self._first = sum(blocks for _, blocks in beside)
        self._contents = MeanContents(
            code,
            [*beside, *((name, code.blocks_of(numel)) for name, numel in factors)],
            messages.dtype,
            Numbers(len(self.plain), messages.plain_dtype),
            flags=len(beside) + len(self.flags),
        )
        self._blocks = messages.new_blocks(self._contents.blocks + 1)
        """What is sent, then what was lost of it. The last block is zero."""
        self._decoded = messages.new_blocks(self._contents.blocks)
        self._places = _places(factors, code).to(buffer.device)
        """Per element of `packed` its place in the blocks of the factors, as one row."""
        self._means: dict[int, QuantisedMean] = {}
        self._averaged: Averaged | None = None

    def sum_over_ranks(
        self, step: StepInfo, what: str, *, last: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> Averaging:
        mean, first = self._mean(step.world_size), self._first
        if self._gradients is not None:
            self._blocks[:first].copy_(self._gradients.delta)
        self._blocks[first:].zero_()
        self._blocks[first:].view(-1).index_copy_(0, self._places, self.packed * step.world_size)
        mean.plain.copy_(self.plain)
        self._flags_of_matrices(mean.flags).copy_(self.flags)

        averaged = yield from mean.over_ranks(
            self._blocks, step.rank, self._messages.largest, what=what, last=last, meanwhile=meanwhile
        )

        decoded = averaged.decode(self._decoded)[first:].view(-1)
        torch.index_select(decoded, 0, self._places, out=self.packed)  # the mean of the factors, the sum of the parts
        self.plain.copy_(averaged.plain)
        self.flags.copy_(self._flags_of_matrices(averaged.flags))
        self._bad.copy_(torch.where(averaged.finite, 0.0, float("nan")))
        self._averaged = averaged

    def subtract_lost(self, factors: Sequence[torch.Tensor]) -> None:
        lost = self._blocks[self._first :].view(-1).index_select(0, self._places)
        for factor, part in zip(factors, lost.split([each.numel() for each in factors]), strict=True):
            factor.sub_(part.view_as(factor))

    def load(self, flat: torch.Tensor, residuals: Residuals, step: StepInfo) -> None:
        if self._gradients is not None:
            self._gradients.form_delta(flat, residuals, step.residual_factor)
            put_flags(self._gradients.slots, flat, self._mean(step.world_size).flags)

    def store(self, flat: torch.Tensor, residuals: Residuals, step: StepInfo, good: torch.Tensor | bool) -> None:
        gradients, first, averaged = self._gradients, self._first, self._averaged
        if gradients is None:
            return
        assert averaged is not None
        gradients.delta.copy_(self._blocks[:first])
        used = gradients.used(averaged.flags[: len(gradients.slots)])
        gradients.keep_lost(residuals, step.residual_factor, good, used)
        gradients.write(self._decoded[:first], used, flat)

    def _flags_of_matrices(self, flags: torch.Tensor) -> torch.Tensor:
        """Those after the flags of the gradients beside."""
        return flags[len(flags) - len(self.flags) :]

    def _mean(self, world_size: int) -> QuantisedMean:
        if world_size not in self._means:
            self._means[world_size] = QuantisedMean(self._contents, world_size, self._messages.device)
        return self._means[world_size]


def _places(factors: Sequence[tuple[str, int]], code: BlockCode) -> torch.Tensor:
    """The place of each element of some factors, which lie one after another, in blocks of their own."""
    found, begin = [], 0
    for _, numel in factors:
        found.append(torch.arange(begin, begin + numel))
        begin += code.blocks_of(numel) * code.block_size
    return torch.cat(found)
