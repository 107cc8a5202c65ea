"""PowerSGD for one bucket of one backward pass: Vogels, Karimireddy, Jaggi, NeurIPS 2019, Algorithms 1 and 2.

`reference.py` says the same in plain torch for one matrix, without any of what makes it fast; tests compare both.
Factors are kept transposed, P as r x n and Q as r x m: the thin products are then several times faster on CPU.
"""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from commhooks.comm.wire import all_finite, put_plain, scatter_into
from commhooks.compressors.base import Exchange, Send, State, StepInfo, Verdict
from commhooks.compressors.error_feedback import clear_flags_of_unused
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot


def low_rank_exchange(flat: torch.Tensor, work: "LowRankKernel", state: State, step: StepInfo) -> Exchange:
    """One step: Algorithm 1 on each matrix, inside the error feedback of Algorithm 2. See `Compressor.exchange`."""
    kernel, bucket = work, BucketPass(flat, work.work, state, step)
    kernel.form_p(bucket)  # 1. delta = gradient + residual; P = delta Q
    bucket.put_uncompressed()
    yield Send(bucket.first.buffer, what="P")  # 2. the mean of P
    kernel.orthonormalize(bucket)  # 3.
    kernel.form_q(bucket)  # 4. Q = delta^T P
    remainder = functools.partial(kernel.form_remainder, bucket)
    yield Send(bucket.last.buffer, what="Q", last=True, meanwhile=remainder)  # 5. the mean of Q
    finite = all_finite(bucket.work.buffer)
    good = yield Verdict(finite)
    if bucket.plain:
        scatter_into(bucket.first.plain, bucket.plain)
    # good: the whole pass is finite on all ranks; finite: this bucket is. If only another bucket is bad, write the mean
    # but learn nothing.
    kernel.reconstruct(bucket, good, finite)  # 6. gradient = P Q^T; residual = delta - P Q^T with the own Q
    return None


class LowRankKernel(Protocol):
    """The computations of a step, for all matrices of a bucket. `CpuKernel` branches on tensor values;
    `AcceleratorKernel` uses masks, so the host never synchronises with the device. `work`: the buffers."""

    work: "PowerSGDWorkspace"

    def form_p(self, bucket: "BucketPass") -> None:
        """delta = gradient + residual; P = delta Q, into the first message, with the flags: per parameter 1 if its
        gradient is not zero, 0 if it is zero, NaN if it is too large for the wire dtype."""

    def orthonormalize(self, bucket: "BucketPass") -> None:
        """P = an orthonormal basis of the mean P."""

    def form_q(self, bucket: "BucketPass") -> None:
        """Q = delta^T P, into the last message. A parameter without a gradient on any rank takes no part."""

    def form_remainder(self, bucket: "BucketPass") -> None:
        """What can be computed while Q is on its way."""

    def reconstruct(self, bucket: "BucketPass", good: torch.Tensor | bool, finite: torch.Tensor) -> None:
        """gradient = P Q^T with the mean Q, into the bucket; and, where `good`, the mean Q and
        residual = delta - P Q^T with this rank's own Q. A parameter without a gradient on any rank keeps its residual:
        DDP may drop the result for it, and a residual sent in it would be lost. Where `finite` is false, gradients
        become NaN on every rank."""


class BucketPass:
    """One bucket of one backward pass: what the kernels read and write.

    Args:
        flat: the bucket's buffer, 1-D, changed in place.
        state: "q" per matrix, `r x m`; "residual" per parameter, flat in memory order.

    Attributes:
        gradients: per matrix its part of the bucket, 1-D.
        plain: what is uncompressed in the bucket.
        first: the message of P, which also holds uncompressed gradients and flags.
        last: the message of Q.
        deltas: gradient + residual; set in `form_p`, in the form that the kernel works on.
        used, used_elements: masks of `AcceleratorKernel`: per matrix whether it has a gradient on some rank, and the
            same per element of a batched bucket.
    """

    deltas: list[torch.Tensor]
    used: torch.Tensor
    used_elements: torch.Tensor

    def __init__(self, flat: torch.Tensor, work: "PowerSGDWorkspace", state: State, step: StepInfo) -> None:
        self.flat, self.work, self.step = flat, work, step
        self.q, self.residuals = state["q"], state["residual"]
        pieces = flat.split(work.sizes)
        self.gradients = [pieces[i] for i in work.place_of_matrix]
        self.plain = [pieces[i] for i in work.place_of_plain]
        self.first, self.last = work.first, work.last

    def put_uncompressed(self) -> None:
        """Write what is not compressed as a matrix into the first message, beside the flags, which are there."""
        if self.step.unused:
            clear_flags_of_unused(self.work.slots, self.first.flags, self.step)
        if self.plain:
            put_plain(self.plain, self.first.plain, self.step.world_size)


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix to compress: `n x m` at `rank`, made of the gradients in `slots`, which are adjacent in the bucket.

    PowerSGD: one slot of n * m elements. Batched PowerSGD: all slots of a bucket, padded with zeros to a square.
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


class PowerSGDWorkspace:
    """The matrices of one bucket layout, with their messages.

    Args:
        matrices: in the order in which they are sent.
        wire_dtype: of the messages.

    Attributes:
        dtype: the compute dtype.
        slots: the parameters in the matrices.
        flags_of: per matrix the places of its parameters in `slots`.
        in_bucket: delta can be computed in the bucket: its dtype is the compute dtype, and no matrix is padded.
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
        self.slots = [slot for matrix in matrices for slot in matrix.slots]
        starts = list(itertools.accumulate((len(matrix.slots) for matrix in matrices), initial=0))
        self.flags_of = list(map(slice, starts, starts[1:]))
        compressed = [matrix.span for matrix in matrices]
        padded = any(stop - start < x.n * x.m for (start, stop), x in zip(compressed, matrices, strict=True))
        self.in_bucket = layout.dtype == self.dtype and not padded
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
        return draw(self._seed, matrix.name, purpose, matrix.rank, matrix.m, self.dtype)

    def refill(self, side: str, place: int) -> torch.Tensor:
        """Random rows, on the CPU, that replace dependent ones of P (`r x n`) or of Q (`r x m`) of the matrix at
        `place`."""
        matrix = self.matrices[place]
        length = matrix.n if side == "P" else matrix.m
        return draw(self._seed, matrix.name, f"refill {side}", matrix.rank, length, self.dtype)


def draw(seed: int, name: str, purpose: str, rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers, `rank x length`, on the CPU; equal on every rank and for every bucket layout."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(rank, length, generator=generator, dtype=dtype)


def _gaps(spans: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """The gaps between `spans` (sorted, disjoint) in 0..numel."""
    gaps, at = [], 0
    for begin, end in [*spans, (numel, numel)]:
        if begin > at:
            gaps.append((at, begin))
        at = end
    return gaps
