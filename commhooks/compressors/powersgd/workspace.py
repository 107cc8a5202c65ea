"""The matrices of a bucket layout and its messages, which PowerSGD's kernels share."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix to compress: `n x m` at `rank`, made of the gradients in `slots`, which are adjacent in the bucket.

    Per-parameter PowerSGD: one slot of n * m elements. Batched PowerSGD: all slots of a bucket, padded with zeros to a
    square.
    """

    name: str
    slots: tuple[Slot, ...]
    n: int
    m: int
    rank: int

    @property
    def span(self) -> tuple[int, int]:
        """Where it begins and ends in the bucket."""
        return self.slots[0].offset, self.slots[-1].stop


class Message:
    """What one all-reduce sums, as a 1-D tensor: factors, then uncompressed gradients, then flags.

    Args:
        factors: per matrix the shape of its factor, `r x length`.
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

    def __init__(self, factors: Sequence[tuple[int, int]], plain: int, flags: int, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        numels = [rank * length for rank, length in factors]
        end = sum(numels)
        self.packed, self.plain, self.flags = buffer[:end], buffer[end : end + plain], buffer[end + plain :][:flags]
        self.factors = [piece.view(shape) for piece, shape in zip(self.packed.split(numels), factors, strict=True)]


class Workspace:
    """The matrices of one bucket layout, with their messages.

    Args:
        matrices: in the order in which they are sent.
        wire_dtype: of the messages.

    Attributes:
        dtype: the compute dtype.
        is_whole_bucket: there is one matrix, of several parameters or padded. Otherwise each is one parameter.
        in_bucket: delta can be computed in the bucket: its dtype is the compute dtype, and no matrix is padded.
        flags_of: per matrix the places of its parameters among those of all matrices.
        first, last: the messages: P with everything uncompressed and the flags; then Q.
        buffer: both messages, so that one operator tells whether all is finite.
    """

    def __init__(
        self,
        layout: BucketLayout,
        matrices: Sequence[Matrix],
        config: PowerSGD,
        wire_dtype: torch.dtype,
    ) -> None:
        self.layout, self.matrices = layout, matrices
        self.dtype = precision.compute_dtype(layout.dtype)
        self.error_feedback, self.warm_start = config.use_error_feedback, config.warm_start
        first = matrices[0]
        padded = first.span[1] - first.span[0] < first.n * first.m
        self.is_whole_bucket = padded or len(first.slots) > 1
        self.in_bucket = layout.dtype == self.dtype and not padded
        starts = list(itertools.accumulate((len(matrix.slots) for matrix in matrices), initial=0))
        self.flags_of = list(map(slice, starts, starts[1:]))
        compressed = [matrix.span for matrix in matrices]
        plain = _gaps(sorted(compressed), layout.numel)
        spans = sorted([*compressed, *plain])
        self.sizes = [stop - start for start, stop in spans]
        self.place_of_matrix = [spans.index(span) for span in compressed]
        self.place_of_plain = [spans.index(span) for span in plain]
        self._seed = config.random_seed
        plain_numel, flags = sum(stop - start for start, stop in plain), starts[-1]
        size_p = sum(x.rank * x.n for x in matrices) + plain_numel + flags
        size_q = sum(x.rank * x.m for x in matrices)
        self.buffer = torch.zeros(size_p + size_q, dtype=wire_dtype, device=layout.device)
        self.first = Message([(x.rank, x.n) for x in matrices], plain_numel, flags, self.buffer[:size_p])
        self.last = Message([(x.rank, x.m) for x in matrices], 0, 0, self.buffer[size_p:])

    def draw_q(self, matrix: Matrix, step: int) -> torch.Tensor:
        """The Q to start from, `r x m`, on the CPU: equal on every rank, for every layout and after a restart."""
        purpose = "Q" if self.warm_start else f"Q at step {step}"
        return codec.draw(self._seed, matrix.name, purpose, matrix.rank, matrix.m, self.dtype)

    def refill(self, side: str, place: int) -> torch.Tensor:
        """Random rows, on the CPU, that replace dependent ones of P (`r x n`) or of Q (`r x m`) of the matrix at
        `place`."""
        matrix = self.matrices[place]
        length = matrix.n if side == "P" else matrix.m
        return codec.draw(self._seed, matrix.name, f"refill {side}", matrix.rank, length, self.dtype)


def _gaps(spans: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """The gaps between `spans` (sorted, disjoint) in 0..numel."""
    gaps, at = [], 0
    for begin, end in [*spans, (numel, numel)]:
        if begin > at:
            gaps.append((at, begin))
        at = end
    return gaps
