"""What a bucket layout needs for its matrices, allocated once: it belongs to one registration and is never saved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks import arithmetic, codec, fused_codec
from commhooks.layout import BucketLayout, Slot


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix to compress: `n x m` at `rank`, made of the gradients in `slots`.

    In per-parameter PowerSGD that is one slot of n * m elements; in the batched form all slots of a bucket, padded with
    zeros to a square.
    """

    name: str
    slots: tuple[tuple[str, Slot], ...]
    """Name and place of each parameter in the matrix, adjacent in the bucket."""
    n: int
    m: int
    rank: int

    @property
    def start(self) -> int:
        return self.slots[0][1].offset

    @property
    def stop(self) -> int:
        return self.slots[-1][1].offset + self.slots[-1][1].numel

    @property
    def fills_bucket_span(self) -> bool:
        return self.stop - self.start == self.n * self.m


@dataclass(frozen=True)
class LowRankOptions:
    """What the exchange has to know of the configuration."""

    use_error_feedback: bool
    draw_q: Callable[[Matrix, int, torch.dtype], torch.Tensor]
    """(matrix, step, dtype) -> r x m on the CPU: the Q to start from."""
    draw_refill: Callable[[Matrix, str, torch.dtype], torch.Tensor]
    """(matrix, "P" or "Q", dtype) -> r x n or r x m on the CPU: directions for those that are missing."""
    warm_start: bool


class LowRankScratch:
    """Buffers of one bucket layout, on its device."""

    def __init__(
        self, layout: BucketLayout, matrices: list[Matrix], wire_dtype: torch.dtype, fused: bool = False
    ) -> None:
        device, dtype = layout.device, arithmetic.compute_dtype(layout.dtype)
        if fused:
            fused_codec.check_supported(device, dtype)
        self.products: Any = fused_codec.load() if fused else codec
        """The passes over whole matrices: plain, or as a native kernel."""
        self.layout = layout
        self.matrices = matrices
        self.dtype = dtype
        self.p = [codec.new_factor(x.rank, x.n, dtype, device) for x in matrices]
        self.q = [codec.new_factor(x.rank, x.m, dtype, device) for x in matrices]
        # A float32 or float64 bucket serves as delta itself; what is narrower, or padded, needs memory of its own.
        self.delta = [
            None if layout.dtype == dtype and x.fills_bucket_span else torch.zeros(x.n, x.m, dtype=dtype, device=device)
            for x in matrices
        ]
        self.in_place = [own is None and len(x.slots) == 1 for own, x in zip(self.delta, matrices, strict=True)]
        self.plain_spans = _complement([(x.start, x.stop) for x in matrices], layout.numel)
        self.wire_dtype = wire_dtype
        self._packed: dict[tuple[int, ...], Packed] = {}
        self._refills: dict[tuple[str, str], torch.Tensor] = {}

    def packed(self, lengths: Sequence[int], *, alone: bool = False) -> "Packed":
        """The buffer that travels with one factor of `rank x length` per matrix; the same one at every call.

        `alone`: without what is not compressed and without the flags.
        """
        key = (*lengths, -1) if alone else tuple(lengths)
        if key not in self._packed:
            self._packed[key] = Packed.new(self, lengths, alone)
        return self._packed[key]

    def refill(self, matrix: Matrix, side: str, options: LowRankOptions) -> torch.Tensor:
        """The directions for missing ones. Kept on an accelerator, where asking whether they are needed would stall;
        drawn anew on the CPU, where they hardly ever are."""
        if arithmetic.host_may_look(self.layout.device):
            return options.draw_refill(matrix, side, self.dtype)
        key = (matrix.name, side)
        if key not in self._refills:
            self._refills[key] = options.draw_refill(matrix, side, self.dtype).to(self.layout.device)
        return self._refills[key]


@dataclass(frozen=True)
class Packed:
    """One all-reduce: factors, everything uncompressed, and one flag per matrix, in one buffer of the wire's dtype."""

    buffer: torch.Tensor
    factors: list[torch.Tensor]
    """Per matrix, `rank x length`."""
    plain: list[torch.Tensor]
    """Per span of the bucket that is not compressed."""
    flags: torch.Tensor
    """Per matrix 1 if its gradient is not zero, summed over the ranks."""

    @classmethod
    def new(cls, scratch: LowRankScratch, lengths: Sequence[int], alone: bool) -> "Packed":
        shapes = [(x.rank, length) for x, length in zip(scratch.matrices, lengths, strict=True)]
        spans = [] if alone else [stop - start for start, stop in scratch.plain_spans]
        flags = 0 if alone else len(shapes)
        numels = [rank * length for rank, length in shapes] + spans + [flags]
        buffer = torch.zeros(sum(numels), dtype=scratch.wire_dtype, device=scratch.layout.device)
        pieces = buffer.split(numels)
        factors = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        return cls(buffer, factors, list(pieces[len(shapes) : -1]), pieces[-1])


def _complement(spans: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """The gaps between `spans` (sorted, disjoint) in 0..numel."""
    gaps, at = [], 0
    for begin, end in [*spans, (numel, numel)]:
        if begin > at:
            gaps.append((at, begin))
        at = end
    return gaps
