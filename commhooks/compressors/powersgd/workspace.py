"""What PowerSGD needs for the matrices of one bucket layout, allocated once. It belongs to one session and is never
saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from commhooks.compressors.powersgd import codec, fused_codec
from commhooks.compressors.powersgd.matrix import Matrix, by_shape
from commhooks.compressors.powersgd.matrix_stack import MatrixStack
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout


class Kernels(Protocol):
    """The passes over whole matrices: `codec`, or the native kernel in `fused_codec`. See `codec` for shapes."""

    def unit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def orthonormal_rows(
        self, rows: torch.Tensor, refill: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def add_and_project(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        factor: float,
        q: torch.Tensor,
        rank: int,
        out: torch.Tensor,
    ) -> None: ...
    def project_q(self, delta: torch.Tensor, p: torch.Tensor, rank: int, out: torch.Tensor) -> None: ...
    def split(
        self, delta: torch.Tensor, local: codec.Factors, mean: codec.Factors, rank: int, residual: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True)
class Draws:
    """Random numbers of PowerSGD: the same on every rank, for every bucket layout and after a restart."""

    seed: int
    warm_start: bool

    def q(self, matrix: Matrix, step: int, dtype: torch.dtype) -> torch.Tensor:
        """The Q to start from, `r x m`, on the CPU."""
        purpose = "Q" if self.warm_start else f"Q at step {step}"
        return codec.draw(self.seed, matrix.name, purpose, matrix.rank, matrix.m, dtype)

    def refill(self, matrix: Matrix, side: str, dtype: torch.dtype) -> torch.Tensor:
        """Rows that replace dependent ones of P (`r x n`) or of Q (`r x m`), on the CPU."""
        length = matrix.n if side == "P" else matrix.m
        return codec.draw(self.seed, matrix.name, f"refill {side}", matrix.rank, length, dtype)


class Workspace:
    """Buffers of one bucket layout, on its device.

    Args:
        draws: for starting factors and missing directions.
        fused: see `fused_codec`.
        stacked: matrices of one shape lie in one stack, for `DeviceExchange`; `p`, `q`, `delta` are empty then.
        stack_deltas: the deltas too, which takes a copy of the gradients.
    """

    def __init__(
        self,
        layout: BucketLayout,
        matrices: list[Matrix],
        wire_dtype: torch.dtype,
        draws: Draws,
        *,
        fused: bool = False,
        stacked: bool = False,
        stack_deltas: bool = False,
    ) -> None:
        device, dtype = layout.device, precision.compute_dtype(layout.dtype)
        if fused:
            fused_codec.check_supported(device, dtype)
        self.kernels: Kernels = fused_codec.load() if fused else codec
        self.draws = draws
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
        self._messages: dict[tuple[int, ...], Message] = {}
        self._refills: dict[tuple[str, str], torch.Tensor] = {}

    def _lives_in_bucket(self, matrix: Matrix) -> bool:
        """A float32 or float64 bucket serves as delta itself; what is narrower, or padded, needs memory of its own."""
        return self.layout.dtype == self.dtype and matrix.fills_bucket_span

    def message(self, lengths: Sequence[int], *, alone: bool = False) -> "Message":
        """The buffer that travels with one factor of `rank x length` per matrix; the same one at every call.

        `alone`: without what is not compressed and without the flags.
        """
        key = (*lengths, -1) if alone else tuple(lengths)
        if key not in self._messages:
            self._messages[key] = Message.new(self, lengths, alone)
        return self._messages[key]

    def refill(self, matrix: Matrix, side: str) -> torch.Tensor:
        """Random rows (r x n or r x m) that replace dependent ones; cached on accelerators, where testing for need
        would synchronise, and drawn anew on the CPU, where they are hardly ever needed."""
        if precision.is_host_readable(self.layout.device):
            return self.draws.refill(matrix, side, self.dtype)
        key = (matrix.name, side)
        if key not in self._refills:
            self._refills[key] = self.draws.refill(matrix, side, self.dtype).to(self.layout.device)
        return self._refills[key]

    def stacked_refill(self, stack: MatrixStack, side: str) -> torch.Tensor:
        """As `refill`, `k x r x length`, rows of norm 1, in float64."""
        key = (stack.matrices[0].name, side)
        if key not in self._refills:
            drawn = torch.stack([self.draws.refill(x, side, self.dtype) for x in stack.matrices])
            self._refills[key] = codec.unit_stack(drawn.to(self.layout.device))[0]
        return self._refills[key]


@dataclass(frozen=True)
class Message:
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
    def new(cls, work: Workspace, lengths: Sequence[int], alone: bool) -> "Message":
        shapes = [(x.rank, length) for x, length in zip(work.matrices, lengths, strict=True)]
        spans = [] if alone else [stop - start for start, stop in work.plain_spans]
        flags = 0 if alone else len(shapes)
        numels = [rank * length for rank, length in shapes] + spans + [flags]
        buffer = torch.zeros(sum(numels), dtype=work.wire_dtype, device=work.layout.device)
        pieces = buffer.split(numels)
        factors = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        counts = [len(stack) for stack in work.stacks]
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
