"""PowerSGD's buffers for the matrices of one bucket layout, allocated once. They belong to one session and are never
saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from commhooks.compressors.native import library
from commhooks.compressors.powersgd import codec, fused_codec
from commhooks.compressors.powersgd.matrix import Matrix, complement, flags_of, spans_of
from commhooks.compressors.powersgd.message import Contents, Message, Messages
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout


class Kernels(Protocol):
    """The operations on whole matrices: `codec`, or the native kernel in `fused_codec`. See `codec` for shapes."""

    def unit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def orthonormal_rows(
        self, rows: torch.Tensor, refill: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def add_and_project_p(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        factor: float,
        q: torch.Tensor,
        rank: int,
        out: torch.Tensor,
    ) -> None: ...
    def add_and_project_q(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        factor: float,
        p: torch.Tensor,
        rank: int,
        out: torch.Tensor,
    ) -> None: ...
    def split(
        self, delta: torch.Tensor, local: codec.Factors, mean: codec.Factors, rank: int, residual: torch.Tensor
    ) -> None: ...
    def reconstruct(self, p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor) -> None: ...
    def remainder(
        self, delta: torch.Tensor, p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True)
class Draws:
    """PowerSGD's random numbers: equal on every rank, for every bucket layout and after a restart."""

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


@dataclass(frozen=True)
class WorkspaceSetup:
    """How a `Workspace` is made.

    Attributes:
        messages: makes the messages of the bucket.
        draws: random numbers for the first Q and for rows that replace dependent ones.
        fused: use `fused_codec`.
        stack_deltas: on an accelerator, copy the gradients so that the deltas of one shape are one tensor.
    """

    messages: Messages
    draws: Draws
    fused: bool = False
    stack_deltas: bool = False


class Workspace:
    """Buffers of one bucket layout, on its device.

    Args:
        matrices: the compressed matrices of the bucket.
        setup: see `WorkspaceSetup`.
    """

    def __init__(self, layout: BucketLayout, matrices: list[Matrix], setup: WorkspaceSetup) -> None:
        device, dtype = layout.device, precision.compute_dtype(layout.dtype)
        if setup.fused:
            library.check_supported(device, dtype)
        self.kernels: Kernels = fused_codec.load(dtype) if setup.fused else codec
        self.draws = setup.draws
        self.layout = layout
        self.dtype = dtype
        self.matrices = matrices
        """In the order in which they are sent."""
        self.p = [codec.new_factor(x.rank, x.n, dtype, device) for x in matrices]
        self.q = [codec.new_factor(x.rank, x.m, dtype, device) for x in matrices]
        self.delta = [
            None if self._lives_in_bucket(x) else torch.zeros(x.n, x.m, dtype=dtype, device=device) for x in matrices
        ]
        self.in_place = [own is None and len(x.slots) == 1 for own, x in zip(self.delta, matrices, strict=True)]
        self.flags_of = flags_of(matrices)
        self.plain_spans = complement(sorted(spans_of([*matrices, *setup.messages.beside])), layout.numel)
        self._plain_numel = sum(stop - start for start, stop in self.plain_spans)
        self.spare: dict[tuple[str, int], torch.Tensor] = {}
        """Memory of factors that are not learned state just now (`alternate`), by matrix and length."""
        self._new_message = setup.messages.new
        self._messages: dict[tuple[int, ...], Message] = {}
        self._refills: dict[tuple[str, str], torch.Tensor] = {}

    def _lives_in_bucket(self, matrix: Matrix) -> bool:
        """Whether delta is a view of the bucket: true for float32 and float64 without padding."""
        return self.layout.dtype == self.dtype and matrix.fills_bucket_span

    def message(self, lengths: Sequence[int], *, alone: bool = False) -> Message:
        """The message with one factor of `rank x length` per matrix; every call returns the same one.

        `alone`: the factors only, without uncompressed gradients and flags.
        """
        key = (*lengths, -1) if alone else tuple(lengths)
        if key not in self._messages:
            factors = [(x.name, (x.rank, length)) for x, length in zip(self.matrices, lengths, strict=True)]
            beside = () if alone else (self._plain_numel, self.flags_of[-1].stop)
            self._messages[key] = self._new_message(Contents(factors, *beside))
        return self._messages[key]

    def refill(self, matrix: Matrix, side: str) -> torch.Tensor:
        """Random rows (r x n or r x m) that replace dependent ones. Cached on accelerators, where testing for need
        would synchronise; drawn at each call on the CPU, where they are rarely needed."""
        if precision.is_host_readable(self.layout.device):
            return self.draws.refill(matrix, side, self.dtype)
        key = (matrix.name, side)
        if key not in self._refills:
            self._refills[key] = self.draws.refill(matrix, side, self.dtype).to(self.layout.device)
        return self._refills[key]
