"""PowerSGD's messages: what is summed over the ranks at once.

A message is one 1-D tensor: factors, then uncompressed gradients, then flags.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.base import Send, StepInfo
from commhooks.gradients.layout import Slot

Averaging = Generator[Send, Any, None]
Residuals = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Contents:
    """What a message holds.

    Attributes:
        factors: per matrix its name and the shape of the factor, `r x length`.
        plain: number of uncompressed elements.
        flags: number of flags, one per parameter in the matrices; 0 in a message of the factors alone.
    """

    factors: Sequence[tuple[str, tuple[int, int]]]
    plain: int = 0
    flags: int = 0

    @property
    def numels(self) -> tuple[int, int, int]:
        """The numbers of elements of all factors, of `plain`, and of the flags."""
        return sum(rank * length for _, (rank, length) in self.factors), self.plain, self.flags


class Message:
    """One message, summed by an all-reduce.

    Attributes:
        buffer: all of it, 1-D. Before it is sent, each rank's part, divided by the number of ranks; then the sums.
        packed: the factors of all matrices, 1-D.
        factors: per matrix a view of `packed`, `r x length`.
        plain: uncompressed gradients, 1-D, in the order of the bucket.
        flags: per parameter in the matrices 1 if its gradient is not zero, 0 otherwise; after the sum positive if any
            rank has a gradient.
    """

    def __init__(self, contents: Contents, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        factors, plain, flags = itertools.accumulate(contents.numels)
        self.packed, self.plain, self.flags = buffer[:factors], buffer[factors:plain], buffer[plain:flags]
        shapes = [shape for _, shape in contents.factors]
        pieces = self.packed.split([rank * length for rank, length in shapes])
        self.factors = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def sum_over_ranks(
        self, step: StepInfo, what: str, *, last: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> Averaging:
        """Replace the buffer by its sum over the ranks. For `what`, `last` and `meanwhile` see `Send`."""
        yield Send(self.buffer, what=what, last=last, meanwhile=meanwhile)

    def subtract_lost(self, factors: Sequence[torch.Tensor]) -> None:
        """Subtract from `factors`, those of this rank, what was lost of them on the way, so that their mean over the
        ranks is what arrives. Complete when `meanwhile` is called. Here nothing is lost: `put_projection` rounds."""

    def load(self, flat: torch.Tensor, residuals: Residuals, step: StepInfo) -> None:
        """Before the message is sent, take the gradients of `Messages.beside` from the bucket. Here there are none."""

    def store(self, flat: torch.Tensor, residuals: Residuals, step: StepInfo, good: torch.Tensor | bool) -> None:
        """After the verdict, write their averages into the bucket and, where `good`, their residuals."""


class Messages:
    """Makes the messages of one bucket layout, here such as are summed by an all-reduce.

    Args:
        dtype: of the messages.

    Attributes:
        beside: parameters that are not matrices here and that messages take from the bucket themselves. All others
            that are not matrices travel uncompressed, in `Message.plain`.
    """

    beside: Sequence[Slot] = ()

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def numel(self, contents: Contents) -> int:
        """Elements of the buffer of such a message."""
        return sum(contents.numels)

    def new_buffer(self, numel: int) -> torch.Tensor:
        """A buffer for one or several messages."""
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def new(self, contents: Contents, buffer: torch.Tensor | None = None) -> Message:
        """A message, in `buffer` or in a new one."""
        return Message(contents, self.new_buffer(self.numel(contents)) if buffer is None else buffer)
