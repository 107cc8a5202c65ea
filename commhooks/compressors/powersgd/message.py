"""PowerSGD's messages: what is summed over the ranks at once. A message is one 1-D tensor: factors, then uncompressed
gradients, then flags."""

from collections.abc import Sequence

import torch

Factors = Sequence[tuple[int, int]]
"""Per matrix the shape of its factor, `r x length`."""


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
        numels = [rank * length for rank, length in factors]
        end = sum(numels)
        self.packed, self.plain, self.flags = buffer[:end], buffer[end : end + plain], buffer[end + plain :][:flags]
        self.factors = [piece.view(shape) for piece, shape in zip(self.packed.split(numels), factors, strict=True)]
