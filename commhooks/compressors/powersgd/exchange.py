"""Run PowerSGD on one bucket in one backward pass: Vogels, Karimireddy, Jaggi, NeurIPS 2019,
Algorithms 1 and 2.

`reference.py` is the readable form for one matrix; tests compare the two. Factors are stored
transposed, P as r x n and Q as r x m, because the thin products are then several times faster on
the CPU.
"""

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from commhooks.comm.packing import all_finite, put_plain, scatter_into
from commhooks.compressors.base import Exchange, Send, State, StepInfo, Verdict
from commhooks.compressors.error_feedback import clear_flags_of_unused
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot


def low_rank_exchange(
    flat: torch.Tensor, work: "LowRankKernel", state: State, step: StepInfo
) -> Exchange:
    """Run one step: Algorithm 1 on each matrix, inside the error feedback of Algorithm 2.

    See `Compressor.exchange`.
    """
    kernel = work
    bucket = BucketPass(flat, kernel.work, state, step)
    kernel.form_p(bucket)  # 1. delta = gradient + residual; P = delta Q
    if step.unused:
        clear_flags_of_unused(kernel.work.slots, bucket.first.flags, step)
    if bucket.plain:
        put_plain(bucket.plain, bucket.first.plain, step.world_size)
    yield Send(bucket.first.buffer, what="P")  # 2. P = mean of P over the ranks
    kernel.orthonormalize(bucket)  # 3. P = orthonormal basis of the columns of P
    kernel.form_q(bucket)  # 4. Q = delta^T P
    remainder = functools.partial(kernel.form_remainder, bucket)
    # 5. mean of Q over the ranks
    yield Send(bucket.last.buffer, what="Q", last=True, meanwhile=remainder)
    finite = all_finite(bucket.work.buffer)
    good = yield Verdict(finite)
    if bucket.plain:
        scatter_into(bucket.first.plain, bucket.plain)
    # `finite` is about this bucket, `good` about all buckets of the pass. If only another bucket is
    # not finite, this bucket still gets its mean, but no learned state changes.
    # 6. gradient = P Q^T; residual = delta - P Q^T with this rank's own Q
    kernel.reconstruct(bucket, good, finite)
    return None


class LowRankKernel(Protocol):
    """Defines the arithmetic of a step, for all matrices of a bucket.

    `CpuKernel` branches on tensor values. `AcceleratorKernel` uses masks, so that the host never
    waits for the device.
    """

    work: "PowerSGDWorkspace"

    def form_p(self, bucket: "BucketPass") -> None:
        """Write P = delta Q into the first message, where delta = gradient + residual.

        Also write a flag per parameter: 1 if its gradient is not zero, 0 if it is, NaN if it is too
        large for the wire dtype.
        """

    def orthonormalize(self, bucket: "BucketPass") -> None: ...

    def form_q(self, bucket: "BucketPass") -> None:
        """Write Q = delta^T P into the last message.

        Leave out parameters without a gradient on any rank.
        """

    def form_remainder(self, bucket: "BucketPass") -> None:
        """Compute what does not depend on the mean Q, while Q is being reduced."""

    def reconstruct(
        self, bucket: "BucketPass", good: torch.Tensor | bool, finite: torch.Tensor
    ) -> None:
        """Write gradient = P Q^T, with the mean Q, into the bucket.

        If `good`, store the mean Q, and residual = delta - P Q^T with this rank's Q. If not
        `finite`, the gradients become NaN on every rank. A parameter without a gradient on any rank
        keeps its residual, because DDP may discard its result.
        """


class BucketPass:
    """Holds the tensors of one bucket in one backward pass.

    `flat`, the bucket's 1-D buffer, changes in place.

    Attributes:
        q, residuals: learned state: per matrix, `r x m`; per parameter, flat in memory order.
        gradients: per matrix a 1-D view of the bucket.
        plain: 1-D views of the uncompressed gradients.
        first, last: the message with P, uncompressed gradients and flags; the message with Q.
        deltas: gradient + residual, in the shape that the kernel needs; set in `form_p`.
        used: in `AcceleratorKernel`, a mask of the matrices that have a gradient on some rank.
        used_elements: the same mask per element of a batched bucket.
    """

    deltas: list[torch.Tensor]
    used: torch.Tensor
    used_elements: torch.Tensor

    def __init__(
        self, flat: torch.Tensor, work: "PowerSGDWorkspace", state: State, step: StepInfo
    ) -> None:
        self.flat = flat
        self.work = work
        self.step = step
        self.q = state["q"]
        self.residuals = state["residual"]
        pieces = flat.split(work.sizes)
        self.gradients = [pieces[i] for i in work.place_of_matrix]
        self.plain = [pieces[i] for i in work.place_of_plain]
        self.first = work.first
        self.last = work.last


@dataclass(frozen=True, eq=False)
class Matrix:
    """Describes an `n x m` matrix to compress at `rank`.

    Its elements are the gradients in `slots`, adjacent in the bucket. PowerSGD: one slot of n * m
    elements. Batched PowerSGD: all slots of a bucket, padded with zeros to a square.
    """

    name: str
    slots: tuple[Slot, ...]
    n: int
    m: int
    rank: int

    @property
    def span(self) -> tuple[int, int]:
        return self.slots[0].offset, self.slots[-1].stop


class Message:
    """Holds the tensor of one all-reduce (`buffer`) and views of its parts.

    These are factors (`packed`), then uncompressed gradients (`plain`), then flags. `factors`: the
    shape of each matrix's factor, `r x length`; the attribute has views of them.

    Before the all-reduce the buffer holds this rank's numbers, divided by the world size;
    afterwards the means. A flag is 1 if its parameter's gradient is not zero, else 0; after the sum
    it is positive if any rank has a gradient.
    """

    def __init__(
        self, factors: Sequence[tuple[int, int]], plain: int, flags: int, buffer: torch.Tensor
    ) -> None:
        self.buffer = buffer
        numels = [rank * length for rank, length in factors]
        self.packed, self.plain, self.flags = buffer.split([sum(numels), plain, flags])
        pieces = self.packed.split(numels)
        self.factors = [piece.view(shape) for piece, shape in zip(pieces, factors, strict=True)]


class PowerSGDWorkspace:
    """Holds the matrices of one bucket layout, in the order of sending, and their messages.

    Attributes:
        slots: the parameters in the matrices.
        flags_of: a slice of `slots` per matrix.
        in_bucket: delta can be computed in the bucket, because it has the compute dtype and no
            matrix is padded.
        buffer: both messages in one tensor, so that one operator checks whether all numbers are
            finite.
    """

    def __init__(
        self,
        layout: BucketLayout,
        matrices: Sequence[Matrix],
        config: PowerSGD,
        wire_dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.matrices = matrices
        self.dtype = precision.compute_dtype(layout.dtype)
        self.error_feedback = config.use_error_feedback
        self.warm_start = config.warm_start
        self.slots = [slot for matrix in matrices for slot in matrix.slots]
        starts = list(itertools.accumulate((len(matrix.slots) for matrix in matrices), initial=0))
        self.flags_of = list(map(slice, starts, starts[1:]))
        compressed = [matrix.span for matrix in matrices]
        numels = [stop - start for start, stop in compressed]
        padded = numels != [matrix.n * matrix.m for matrix in matrices]
        self.in_bucket = layout.dtype == self.dtype and not padded
        plain = _gaps(sorted(compressed), layout.numel)
        spans = sorted([*compressed, *plain])
        self.sizes = [stop - start for start, stop in spans]
        self.place_of_matrix = [spans.index(span) for span in compressed]
        self.place_of_plain = [spans.index(span) for span in plain]
        self._seed = config.random_seed
        plain_numel = sum(stop - start for start, stop in plain)
        flags = len(self.slots)
        size_p = sum(x.rank * x.n for x in matrices) + plain_numel + flags
        size_q = sum(x.rank * x.m for x in matrices)
        self.buffer = torch.zeros(size_p + size_q, dtype=wire_dtype, device=layout.device)
        shapes_p = [(x.rank, x.n) for x in matrices]
        shapes_q = [(x.rank, x.m) for x in matrices]
        self.first = Message(shapes_p, plain_numel, flags, self.buffer[:size_p])
        self.last = Message(shapes_q, 0, 0, self.buffer[size_p:])

    def draw_q(self, matrix: Matrix, step: int) -> torch.Tensor:
        purpose = "Q" if self.warm_start else f"Q at step {step}"
        return draw(self._seed, matrix.name, purpose, matrix.rank, matrix.m, self.dtype)

    def refill(self, side: str, place: int) -> torch.Tensor:
        matrix = self.matrices[place]
        length = matrix.n if side == "P" else matrix.m
        return draw(self._seed, matrix.name, f"refill {side}", matrix.rank, length, self.dtype)


def draw(
    seed: int, name: str, purpose: str, rank: int, length: int, dtype: torch.dtype
) -> torch.Tensor:
    """Draw standard normal numbers, `rank x length`, on the CPU.

    They are equal on every rank, for every bucket layout, and after a restart.
    """
    digest = hashlib.sha256(f"{seed}\0{name}\0{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(rank, length, generator=generator, dtype=dtype)


def _gaps(spans: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    gaps = []
    previous_end = 0
    for begin, end in [*spans, (numel, numel)]:
        if begin > previous_end:
            gaps.append((previous_end, begin))
        previous_end = end
    return gaps
