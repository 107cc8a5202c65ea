"""PowerSGD's messages: what is summed over the ranks at once, as it is or in blocks of small integers.

A message is one 1-D tensor: factors, then uncompressed gradients, then flags.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.wire import put_flags
from commhooks.compressors.base import Send, StepInfo
from commhooks.compressors.error_feedback import clear_flags_of_unused
from commhooks.compressors.named_views import NamedViews
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.mean import mean_over_ranks
from commhooks.compressors.quantized.messages import Averaged, ShareMessages
from commhooks.compressors.quantized.torch_kernel import TorchKernel
from commhooks.gradients.layout import Slot

Averaging = Generator[Send, Any, None]
Residuals = dict[str, torch.Tensor]
Factors = Sequence[tuple[str, tuple[int, int]]]
"""Per matrix its name and the shape of its factor, `r x length`."""


class Message:
    """One message, summed by an all-reduce.

    Args:
        plain: number of uncompressed elements.
        flags: number of flags, one per parameter in the matrices; 0 in a message of the factors alone.

    Attributes:
        buffer: all of it, 1-D. Before it is sent, each rank's part, divided by the number of ranks; then the sums.
        packed: the factors of all matrices, 1-D.
        factors: per matrix a view of `packed`, `r x length`.
        plain: uncompressed gradients, 1-D, in the order of the bucket.
        flags: per parameter in the matrices 1 if its gradient is not zero, 0 otherwise; after the sum positive if any
            rank has a gradient.
    """

    def __init__(self, factors: Factors, plain: int, flags: int, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        numels = [rank * length for _, (rank, length) in factors]
        end = sum(numels)
        self.packed, self.plain, self.flags = buffer[:end], buffer[end : end + plain], buffer[end + plain :][:flags]
        pieces = zip(self.packed.split(numels), factors, strict=True)
        self.factors = [piece.view(shape) for piece, (_, shape) in pieces]

    def sum_over_ranks(
        self, step: StepInfo, what: str, *, last: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> Averaging:
        """Replace the buffer by its sum over the ranks. For `what`, `last` and `meanwhile` see `Send`."""
        yield Send(self.buffer, what=what, last=last, meanwhile=meanwhile)


@dataclass(frozen=True, eq=False)
class InBlocks:
    """How the messages of one bucket layout are quantised. Every factor and every parameter begins a new block.

    Attributes:
        direct: the parameters that are quantised as they are, with error feedback.
        residuals: of `direct`, whichever message takes them.
        plain_dtype: the dtype in which other uncompressed gradients travel.
        largest: numbers beyond it are clamped; error feedback keeps the rest.
    """

    code: BlockCode
    direct: Sequence[Slot]
    residuals: NamedViews
    plain_dtype: torch.dtype
    largest: float


class QuantisedMessage(Message):
    """One message in the compute dtype, for the wrappers "int8" and "int4".

    The factors and the gradients that PowerSGD does not compress become blocks of small integers with a scale each, and
    the quantised mean (`quantized/mean.py`) takes the place of the all-reduce. What is lost on the way comes back:

        Q           the residual is formed from this rank's Q less what was lost of it. The mean of these over the ranks
                    is the Q that all receive, so the mean residual is exact.
        P           all ranks receive the same bits, and any P does: its basis is formed after it has arrived.
        all others  have residuals of their own, as in the quantised hooks.

    The blocks of the gradients that are quantised as they are come first, then those of the factors.
    The last element of the buffer is NaN after the sum if anything that has arrived is not finite, else 0.
    """

    def __init__(self, how: InBlocks, factors: Factors, plain: int, flags: int, buffer: torch.Tensor) -> None:
        super().__init__(factors, plain, flags, buffer)
        self._bad = buffer[-1]
        self._how, code = how, how.code
        self._direct = how.direct if flags else ()  # a message of the factors alone has no flags
        direct = [(slot.name, code.blocks_of(slot.numel)) for slot in self._direct]
        blocks_of = [(name, code.blocks_of(rank * length)) for name, (rank, length) in factors]
        self._tensors = [*direct, *blocks_of]
        self._first = sum(blocks for _, blocks in direct)
        self._decoded = buffer.new_zeros(sum(blocks for _, blocks in self._tensors), code.block_size)
        starts = itertools.accumulate((blocks * code.block_size for _, blocks in blocks_of), initial=0)
        places = [torch.arange(start, start + each.numel()) for start, each in zip(starts, self.factors, strict=False)]
        self._places = torch.cat(places).to(buffer.device)
        """Per element of `packed` its place in the blocks of the factors, as one row."""
        self._kernel: TorchKernel | None = None
        self._averaged: Averaged | None = None

    def kernel(self, step: StepInfo) -> TorchKernel:
        """The kernel for the ranks of this step, which are the same in every step."""
        made, how = self._kernel, self._how
        if made is None or (made.messages.world_size, made.rank) != (step.world_size, step.rank):
            shares = ShareMessages(
                how.code,
                self._tensors,
                self.buffer.dtype,
                step.world_size,
                self.buffer.device,
                largest=how.largest,
                plain=(len(self.plain), how.plain_dtype),
                flags=len(self._direct) + len(self.flags),
            )
            made = self._kernel = TorchKernel(shares, step.rank, self._direct, how.residuals if self._direct else None)
        return made

    def sum_over_ranks(
        self, step: StepInfo, what: str, *, last: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> Averaging:
        kernel, first = self.kernel(step), self._first
        kernel.delta[first:].zero_()
        kernel.delta[first:].view(-1).index_copy_(0, self._places, self.packed * step.world_size)
        kernel.messages.plain.copy_(self.plain)
        self._flags_of_matrices(kernel.messages.flags).copy_(self.flags)

        self._averaged = averaged = yield from mean_over_ranks(kernel, what=what, last=last, meanwhile=meanwhile)

        decoded = kernel.decode(averaged, self._decoded)[first:].view(-1)
        torch.index_select(decoded, 0, self._places, out=self.packed)  # the mean of the factors, the sum of the parts
        self.plain.copy_(averaged.plain)
        self.flags.copy_(self._flags_of_matrices(averaged.flags))
        self._bad.copy_(torch.where(averaged.finite, 0.0, float("nan")))

    def subtract_lost(self, factors: Sequence[torch.Tensor]) -> None:
        """Subtract from `factors`, those of this rank, what was lost of them on the way, so that their mean over the
        ranks is what arrives. Complete when `meanwhile` is called. (Without blocks, `put_projection` does it.)"""
        assert self._kernel is not None
        lost = self._kernel.delta[self._first :].view(-1).index_select(0, self._places)
        for factor, part in zip(factors, lost.split([each.numel() for each in factors]), strict=True):
            factor.sub_(part.view_as(factor))

    def load(self, flat: torch.Tensor, residuals: Residuals, step: StepInfo) -> None:
        """Before the message is sent, take what travels as blocks from the bucket."""
        kernel = self.kernel(step)
        kernel.load(flat, residuals, step.residual_factor)
        flags = kernel.messages.flags[: len(self._direct)]
        put_flags([slot.of(flat) for slot in self._direct], flags)
        clear_flags_of_unused(self._direct, flags, step)

    def store(self, flat: torch.Tensor, residuals: Residuals, step: StepInfo, good: torch.Tensor | bool) -> None:
        """After the verdict, write its averages into the bucket and, where `good`, its residuals."""
        assert self._kernel is not None and self._averaged is not None
        self._kernel.store(self._averaged, flat, residuals, step.residual_factor, good, self._decoded)

    def _flags_of_matrices(self, flags: torch.Tensor) -> torch.Tensor:
        return flags[len(self._direct) :]
