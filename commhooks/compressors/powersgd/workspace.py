"""What a bucket layout needs for its matrices, allocated once: it belongs to one registration and is never saved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.powersgd import codec, fused_codec
from commhooks.compressors.powersgd.matrix import Matrix, by_shape
from commhooks.compressors.powersgd.matrix_stack import MatrixStack
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout


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
    """Buffers of one bucket layout, on its device.

    Args:
        fused: see `fused_codec`.
        stacked: matrices of one shape lie in one stack, for `MaskedExchange`; `p`, `q`, `delta` are empty then.
        stack_deltas: the deltas too, which takes a copy of the gradients.
    """

    def __init__(
        self,
        layout: BucketLayout,
        matrices: list[Matrix],
        wire_dtype: torch.dtype,
        *,
        fused: bool = False,
        stacked: bool = False,
        stack_deltas: bool = False,
    ) -> None:
        device, dtype = layout.device, precision.compute_dtype(layout.dtype)
        if fused:
            fused_codec.check_supported(device, dtype)
        self.products: Any = fused_codec.load() if fused else codec
        """The passes over whole matrices: plain, or as a native kernel."""
        self.layout = layout
        self.dtype = dtype
        groups = by_shape(matrices) if stacked else []
        self.stacks = [
            MatrixStack(
                group, dtype, device, own_delta=not self._lives_in_bucket(group[0]) or (stack_deltas and len(group) > 1)
            )
            for group in groups
        ]
        self.matrices = [x for group in groups for x in group] if stacked else matrices
        """In the order in which they travel."""
        apart = [] if stacked else matrices
        self.p = [codec.new_factor(x.rank, x.n, dtype, device) for x in apart]
        self.q = [codec.new_factor(x.rank, x.m, dtype, device) for x in apart]
        self.delta = [
            None if self._lives_in_bucket(x) else torch.zeros(x.n, x.m, dtype=dtype, device=device) for x in apart
        ]
        self.in_place = [own is None and len(x.slots) == 1 for own, x in zip(self.delta, apart, strict=True)]
        self.plain_spans = _complement(sorted((x.start, x.stop) for x in matrices), layout.numel)
        self.wire_dtype = wire_dtype
        self._packed: dict[tuple[int, ...], Packed] = {}
        self._refills: dict[tuple[str, str], torch.Tensor] = {}

    def _lives_in_bucket(self, matrix: Matrix) -> bool:
        """A float32 or float64 bucket serves as delta itself; what is narrower, or padded, needs memory of its own."""
        return self.layout.dtype == self.dtype and matrix.fills_bucket_span

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
        if precision.host_may_look(self.layout.device):
            return options.draw_refill(matrix, side, self.dtype)
        key = (matrix.name, side)
        if key not in self._refills:
            self._refills[key] = options.draw_refill(matrix, side, self.dtype).to(self.layout.device)
        return self._refills[key]

    def stacked_refill(self, stack: MatrixStack, side: str, options: LowRankOptions) -> torch.Tensor:
        """As `refill`, `k x r x length`, rows of norm 1, in float64."""
        key = (stack.matrices[0].name, side)
        if key not in self._refills:
            drawn = torch.stack([options.draw_refill(x, side, self.dtype) for x in stack.matrices])
            self._refills[key] = codec.unit_stack(drawn.to(self.layout.device))[0]
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
    stacked_factors: list[torch.Tensor]
    """Per stack, `k x rank x length`: the same memory as `factors`."""
    stacked_flags: tuple[torch.Tensor, ...]
    """Per stack, `k`: the same memory as `flags`."""

    @classmethod
    def new(cls, scratch: LowRankScratch, lengths: Sequence[int], alone: bool) -> "Packed":
        shapes = [(x.rank, length) for x, length in zip(scratch.matrices, lengths, strict=True)]
        spans = [] if alone else [stop - start for start, stop in scratch.plain_spans]
        flags = 0 if alone else len(shapes)
        numels = [rank * length for rank, length in shapes] + spans + [flags]
        buffer = torch.zeros(sum(numels), dtype=scratch.wire_dtype, device=scratch.layout.device)
        pieces = buffer.split(numels)
        factors = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        counts = [len(stack) for stack in scratch.stacks]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        stacked = [
            buffer[sum(numels[:first]) :][: sum(numels[first : first + k])].view(k, *shapes[first])
            for first, k in zip(firsts, counts, strict=True)
        ]
        flags_of = pieces[-1].split(counts) if counts and flags else ()
        return cls(buffer, factors, list(pieces[len(shapes) : -1]), pieces[-1], stacked, flags_of)


def _complement(spans: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """The gaps between `spans` (sorted, disjoint) in 0..numel."""
    gaps, at = [], 0
    for begin, end in [*spans, (numel, numel)]:
        if begin > at:
            gaps.append((at, begin))
        at = end
    return gaps
