"""Compute a step of PowerSGD on an accelerator, for all matrices at once.

The host never synchronises with the device: masks replace branches. Seven kernels run per matrix,
or per shape with stacked deltas: the maximum of the gradient, the sum with the residual, P, Q, the
new residual, its mask, the gradient. All others work on the packed factors of the bucket: their
number depends neither on the layers nor on the rank.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from commhooks.comm.packing import (
    concat_into,
    largest_gradient,
    pack_factor,
    put_projection,
    scatter_into,
)
from commhooks.compressors.error_feedback import NamedViews
from commhooks.compressors.powersgd.exchange import BucketPass, Matrix, PowerSGDWorkspace
from commhooks.gradients.loss_scale import chosen, is_one


@dataclass(frozen=True, eq=False)
class Block:
    """Holds `k` matrices `n x m` of the same rank, which one kernel multiplies.

    Attributes:
        members: a slice of the bucket's matrices.
        shape: `(k, n, m)`.
        delta: memory for the deltas, `k x n x m`; None if delta is computed in the bucket, and then
            `k` is 1.
        p, q: the factors, `k x r x n` and `k x r x m`.
        largest: the largest absolute gradient of each matrix.
    """

    members: slice
    shape: tuple[int, int, int]
    delta: torch.Tensor | None
    p: torch.Tensor
    q: torch.Tensor
    largest: torch.Tensor


class AcceleratorKernel:
    """Implements `LowRankKernel` for matrices that consist of one parameter, on any device.

    If the rows of P are independent (see `orthonormal_stack`), the results equal the results of
    `CpuKernel` up to rounding. `stack_deltas`: copy gradients of one shape into one tensor; the
    matrices of `work` are ordered by shape (see `by_shape`).
    """

    def __init__(self, work: PowerSGDWorkspace, *, stack_deltas: bool) -> None:
        self.work = work
        self.p = self._factors("P")
        self.q = self._factors("Q")
        self.largest = torch.zeros(len(work.slots), dtype=work.dtype, device=work.layout.device)
        self.blocks = list(self._new_blocks(stack_deltas))
        # Learned state is allocated here and not when it is first written: see
        # `Compressor.allocate`.
        self._learned_q = self._new_learned_q()
        self._residuals: NamedViews | None = None
        self._residual_of: list[torch.Tensor] = []
        if work.error_feedback:
            self._residuals = self._new_residuals()
            shapes = [block.shape for block in self.blocks]
            pieces = self._residuals.whole.split([k * n * m for k, n, m in shapes])
            self._residual_of = [
                piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)
            ]

    def _new_blocks(self, stack_deltas: bool) -> Iterator[Block]:
        work = self.work
        begin = p = q = 0  # places in the matrices and in the packed factors
        for (n, m, r), group in itertools.groupby(work.matrices, key=_shape):
            count = len(list(group))
            copies = not work.in_bucket or (stack_deltas and count > 1)
            k = count if copies else 1
            for _ in range(count // k):
                delta = None
                if copies:
                    delta = torch.zeros(k, n, m, dtype=work.dtype, device=work.layout.device)
                yield Block(
                    slice(begin, begin + k),
                    (k, n, m),
                    delta,
                    self.p.flat[p : p + k * r * n].view(k, r, n),
                    self.q.flat[q : q + k * r * m].view(k, r, m),
                    self.largest[begin : begin + k],
                )
                begin += k
                p += k * r * n
                q += k * r * m

    # ---- the steps -------------------------------------------------------------------------------

    def form_p(self, bucket: BucketPass) -> None:
        self._load_deltas(bucket)
        self._put_flags(bucket)
        self._add_residuals(bucket)
        self.q.unit_rows(self._starting_q(bucket))
        for block, delta in zip(self.blocks, bucket.deltas, strict=True):
            torch.bmm(block.q, delta.transpose(1, 2), out=block.p)
        pack_factor(self.p.flat, bucket.first.packed, bucket.step.world_size)

    def orthonormalize(self, bucket: BucketPass) -> None:
        # Set P to zero for a matrix without a gradient on any rank. Then P Q^T = 0: delta = 0 +
        # residual becomes the new residual, and the averaged gradient is zero.
        bucket.used = self.used(bucket)
        self.p.orthonormalize(bucket.first.packed, bucket.used)

    def form_q(self, bucket: BucketPass) -> None:
        for block, delta in zip(self.blocks, bucket.deltas, strict=True):
            torch.bmm(block.p, delta, out=block.q)
        rank = max(matrix.rank for matrix in self.work.matrices)
        put_projection(self.q.flat, bucket.last.packed, bucket.step.world_size, rank=rank)

    def form_remainder(self, bucket: BucketPass) -> None:
        if not self.work.error_feedback:
            return
        # delta = delta - P Q^T with this rank's Q: the new residual, stored in `reconstruct`.
        for block, delta in zip(self.blocks, bucket.deltas, strict=True):
            delta.baddbmm_(block.p.transpose(1, 2), block.q, alpha=-1)

    def reconstruct(
        self, bucket: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor
    ) -> None:
        good = torch.as_tensor(good, device=self.work.layout.device)
        if self.work.error_feedback:
            self.keep_residuals(bucket, good)
        # Learn the mean Q of the matrices that have a gradient on some rank, if the pass is good.
        q = self.q.flat.copy_(bucket.last.packed)
        learned = self._learned_q.bind(bucket.q, functools.partial(self._draw_q, bucket))[:-1]
        keep = (good & bucket.used).index_select(0, self.q.matrix_of)
        torch.where(keep, q, learned, out=learned)
        # gradient = P mean_Q^T, or NaN if this bucket is not finite
        q.add_(torch.where(finite, 0.0, float("nan")))
        for block, delta in zip(self.blocks, bucket.deltas, strict=True):
            torch.bmm(block.p.transpose(1, 2), block.q, out=delta)
            if block.delta is not None:
                gradients = bucket.gradients[block.members]
                scatter_into(delta.view(-1)[: sum(map(len, gradients))], gradients)

    # ---- overridden for batched PowerSGD ---------------------------------------------------------

    def used(self, bucket: BucketPass) -> torch.Tensor:
        return bucket.first.flags > 0

    def find_largest(self, bucket: BucketPass) -> None:
        for block, delta in zip(self.blocks, bucket.deltas, strict=True):
            torch.linalg.vector_norm(delta, float("inf"), dim=(1, 2), out=block.largest)

    def keep_residuals(self, bucket: BucketPass, good: torch.Tensor) -> None:
        factor = chosen(good, bucket.step.residual_factor, 1.0) if bucket.step.unused else 1.0
        residuals = self.bound_residuals(bucket)
        for block, delta, residual in zip(self.blocks, bucket.deltas, residuals, strict=True):
            keep = good
            if bucket.step.unused:
                # The delta of a parameter that no rank has used may contain the gradient of an
                # earlier pass: its residual stays, rescaled to the current loss scale.
                keep = good & bucket.used[block.members].view(-1, 1, 1)
                if not is_one(factor):
                    residual.mul_(factor)
            torch.where(keep, delta, residual, out=residual)

    # ---- delta and residual ----------------------------------------------------------------------

    def _load_deltas(self, bucket: BucketPass) -> None:
        bucket.deltas = []
        for block in self.blocks:
            gradients = bucket.gradients[block.members]
            if block.delta is None:
                bucket.deltas.append(gradients[0].view(block.shape))
                continue
            bucket.deltas.append(block.delta)
            flat = block.delta.view(-1)
            filled = sum(map(len, gradients))
            if filled < len(flat):
                flat[filled:].zero_()
            concat_into(gradients, flat[:filled])

    def _put_flags(self, bucket: BucketPass) -> None:
        flags = bucket.first.flags
        self.find_largest(bucket)
        has_gradient = self.largest != 0
        limit = largest_gradient(flags.dtype)
        if limit < torch.finfo(self.work.layout.dtype).max:
            flag = has_gradient.to(flags.dtype)
            flags.copy_(torch.where(self.largest > limit, float("nan"), flag))
        else:
            flags.copy_(has_gradient)

    def _add_residuals(self, bucket: BucketPass) -> None:
        if self._residuals is None:
            return
        if not any(slot.name in bucket.residuals for slot in self.work.slots):
            return
        self._residuals.gather(bucket.residuals)
        factor = bucket.step.residual_factor
        for delta, residual in zip(bucket.deltas, self._residual_of, strict=True):
            if isinstance(factor, float):
                delta.add_(residual, alpha=factor)
            else:
                delta.addcmul_(residual, factor)

    def bound_residuals(self, bucket: BucketPass) -> list[torch.Tensor]:
        assert self._residuals is not None
        self._residuals.bind(bucket.residuals)
        return self._residual_of

    def _new_residuals(self) -> NamedViews:
        entries = []
        numel = 0
        for matrix in self.work.matrices:
            first = numel - matrix.span[0]
            entries += [(slot.name, first + slot.offset, (slot.numel,)) for slot in matrix.slots]
            numel += matrix.n * matrix.m
        whole = torch.zeros(numel, dtype=self.work.dtype, device=self.work.layout.device)
        return NamedViews(entries, whole)

    # ---- factors ---------------------------------------------------------------------------------

    def _factors(self, side: str) -> "PackedFactors":
        shapes = [(x.rank, x.n if side == "P" else x.m) for x in self.work.matrices]
        refill = [self.work.refill(side, i) for i in range(len(self.work.matrices))]
        return PackedFactors(shapes, refill, self.work.dtype, self.work.layout.device)

    def _new_learned_q(self) -> NamedViews:
        entries = []
        numel = 0
        for matrix in self.work.matrices:
            entries.append((matrix.name, numel, (matrix.rank, matrix.m)))
            numel += matrix.rank * matrix.m
        return NamedViews(entries, new_packed(numel, self.work.dtype, self.work.layout.device))

    def _starting_q(self, bucket: BucketPass) -> torch.Tensor:
        fill = functools.partial(self._draw_q, bucket)
        if self.work.warm_start:
            return self._learned_q.gather(bucket.q, fill)
        drawn = [fill(i).flatten() for i in range(len(self.work.matrices))]
        packed = torch.cat([*drawn, torch.zeros(1, dtype=self.work.dtype)])
        if torch.accelerator.is_available():
            packed = packed.pin_memory()  # a copy from pageable memory would make the host wait
        return packed.to(self.work.layout.device, non_blocking=True)

    def _draw_q(self, bucket: BucketPass, i: int) -> torch.Tensor:
        return self.work.draw_q(self.work.matrices[i], bucket.step.number)


def by_shape(matrices: Sequence[Matrix]) -> list[Matrix]:
    shapes = list(dict.fromkeys(map(_shape, matrices)))
    return sorted(matrices, key=lambda matrix: shapes.index(_shape(matrix)))


def _shape(matrix: Matrix) -> tuple[int, int, int]:
    return matrix.n, matrix.m, matrix.rank


# ---- one factor of every matrix ------------------------------------------------------------------

# Factors share a padded tensor if padding makes their rows at most `_WASTE` times as long in total,
# or if the padded rows have at most `_SMALL` elements in total. Neither limit depends on r, so the
# number of kernels does not either.
_WASTE = 4
_SMALL = 2**14


class PackedFactors:
    """Holds P or Q of all matrices, transposed, so that a few kernels process all of them.

    Packed factors, `r x length` each, are adjacent in a 1-D tensor, as they are sent. Operators on
    rows need tensors of one shape, so factors of similar length form a group and are padded with
    zeros, which change no product.

    Args:
        shapes: `(r, length)` of each matrix.
        refill: random rows, `r x length`, on the CPU, to replace zero and dependent rows of each
            matrix.

    Attributes:
        flat: the packed factors, in the compute dtype.
        matrix_of: the index of the matrix to which each element of `flat` belongs.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        refill: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        numels = torch.tensor([rank * length for rank, length in shapes])
        self.numel = int(numels.sum())
        self._memory = new_packed(self.numel, dtype, device)
        self.flat = self._memory[:-1]
        self.matrix_of = torch.arange(len(shapes)).repeat_interleave(numels).int().to(device)
        self._alike = len(set(shapes)) == 1
        """All factors have one shape, so that padded and packed tensors are the same."""
        self._groups = _grouped(shapes)
        self._sizes = [torch.Size(group.shape).numel() for group in self._groups]
        self._members = [torch.tensor(group.members, device=device) for group in self._groups]
        to_padded, to_packed = self._places(shapes)
        self._to_padded = to_padded.to(device)
        self._to_packed = to_packed.to(device)
        zero = torch.zeros(1, dtype=refill[0].dtype)
        random_rows = torch.cat([*(rows.flatten() for rows in refill), zero]).to(device)
        self._refill = [unit_stack(rows)[0].to(dtype) for rows in self._padded(random_rows)]
        self._result = self.flat
        if not self._alike:
            self._result = torch.zeros(sum(self._sizes), dtype=dtype, device=device)
        self._results = self._views(self._result)

    def _places(self, shapes: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each padded element is in the packed tensor, and the reverse (int32)."""
        # Padding is read from the last element of the packed tensor, which is always zero.
        to_padded = torch.full((sum(self._sizes),), self.numel, dtype=torch.int32)
        to_packed = torch.empty(self.numel, dtype=torch.int32)
        in_packed = torch.arange(self.numel, dtype=torch.int32).split([r * k for r, k in shapes])
        out_packed = to_packed.split([r * k for r, k in shapes])
        in_padded = self._views(torch.arange(sum(self._sizes), dtype=torch.int32))
        out_padded = self._views(to_padded)
        for group, places, block in zip(self._groups, in_padded, out_padded, strict=True):
            for row, i in enumerate(group.members):
                rank, length = shapes[i]
                block[row, :rank, :length] = in_packed[i].view(rank, length)
                out_packed[i].copy_(places[row, :rank, :length].flatten())
        return to_padded, to_packed

    def unit_rows(self, packed: torch.Tensor) -> None:
        """Write the rows of `packed`, scaled to norm 1, into `flat`.

        Random rows replace zero rows.
        """
        padded = self._padded(packed)
        for rows, refill, out in zip(padded, self._refill, self._results, strict=True):
            unit, missing = unit_stack(rows)
            torch.addcmul(unit, refill, missing, out=out)
        self._pack()

    def orthonormalize(self, arrived: torch.Tensor, keep: torch.Tensor) -> None:
        """Write orthonormal bases of the rows of `arrived` (1-D, `numel` elements) into `flat`.

        Zeros for matrices whose `keep` (bool, one per matrix) is False. See `orthonormal_stack`.
        """
        self.flat.copy_(arrived)
        padded = self._padded(self._memory)
        groups = zip(padded, self._refill, self._members, self._results, strict=True)
        for rows, refill, members, out in groups:
            kept = keep if self._alike else keep.index_select(0, members)
            torch.mul(orthonormal_stack(rows, refill), kept.view(-1, 1, 1), out=out)
        self._pack()

    def _padded(self, packed: torch.Tensor) -> list[torch.Tensor]:
        return self._views(packed[:-1] if self._alike else packed.index_select(0, self._to_padded))

    def _views(self, padded: torch.Tensor) -> list[torch.Tensor]:
        pieces = zip(padded.split(self._sizes), self._groups, strict=True)
        return [piece.view(group.shape) for piece, group in pieces]

    def _pack(self) -> None:
        if not self._alike:
            torch.index_select(self._result, 0, self._to_packed, out=self.flat)


def new_packed(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate packed factors: `numel` elements, and one that stays zero and is read as padding."""
    return torch.zeros(numel + 1, dtype=dtype, device=device)


@dataclass(frozen=True)
class _Group:
    members: list[int]
    shape: tuple[int, int, int]
    """`k x r x length` of the padded tensor, with the largest r and length in the group."""


def _grouped(shapes: Sequence[tuple[int, int]]) -> list[_Group]:
    groups: list[list[int]] = []
    unpadded = 0
    for i in sorted(range(len(shapes)), key=lambda i: shapes[i][1]):
        length = shapes[i][1]  # the largest one so far
        padded = (len(groups[-1]) + 1) * length if groups else 0
        if groups and padded <= max(_WASTE * (unpadded + length), _SMALL):
            groups[-1].append(i)
            unpadded += length
        else:
            groups.append([i])
            unpadded = length
    return [_Group(members, _padded_shape(members, shapes)) for members in groups]


def _padded_shape(
    members: Sequence[int], shapes: Sequence[tuple[int, int]]
) -> tuple[int, int, int]:
    ranks, lengths = zip(*(shapes[i] for i in members), strict=True)
    return len(members), max(ranks), max(lengths)


# ---- orthonormal rows ----------------------------------------------------------------------------

# A row is weak if the part of it that is independent of the rows before it has less than `_WEAK`
# times its norm. `_NUDGE` times a random row is added to a weak row.
_WEAK = 1e-2
_NUDGE = 1e-6


def orthonormal_stack(rows: torch.Tensor, refill: torch.Tensor) -> torch.Tensor:
    """Orthonormalise the rows of a stack of matrices (k x r x n) on an accelerator.

    It takes about 40 kernels, whatever k and r are. The result is in float64. Non-finite numbers
    count as zero. `refill`: random rows of norm 1 (k x r x n), independent of `rows` with
    probability 1.

    Shifted Cholesky QR in float64, four times (Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa:
    Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices, SIAM J. Sci.
    Comput. 2020). The Gram matrix does not reveal dependent rows reliably. Therefore 1e-6 times a
    row of `refill` is added to every row that may be dependent, which makes it independent. This
    turns the row by an angle of at most 1e-6. It turns the component that a weak row adds to the
    others, of norm e, by about 1e-6 / e.
    """
    rows, _ = unit_stack(torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0))
    triangle, failed = _triangle(rows)
    weak = (triangle.diagonal(dim1=1, dim2=2) < _WEAK) | (failed != 0).unsqueeze(-1)
    rows, _ = unit_stack(rows.addcmul_(refill, weak.unsqueeze(-1), value=_NUDGE))
    # Each pass computes rows = L^-1 rows, where rows rows^T = L L^T, and brings rows rows^T closer
    # to the identity.
    for _ in range(3):
        rows = torch.linalg.solve_triangular(_triangle(rows)[0], rows, upper=False)
    return rows


def _triangle(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Cholesky factor of rows rows^T (k x r x r, lower triangular), and LAPACK's info.

    The info (k) is 0 for success.
    """
    gram = torch.bmm(rows, rows.transpose(1, 2))
    # the shift: keeps it positive definite despite rounding
    gram.diagonal(dim1=1, dim2=2).add_(1e-13 * rows.shape[1])
    # `cholesky` would wait for the device to check for failure
    return torch.linalg.cholesky_ex(gram)


def unit_stack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale the rows of a stack (k x r x n) to norm 1, and return which are zero (k x r x 1).

    Zero rows stay zero. In float64, because there no square of a float32 overflows.
    """
    rows = rows.double()
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / norm.clamp_min(1e-300), norm == 0
