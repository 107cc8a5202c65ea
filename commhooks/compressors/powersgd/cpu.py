"""Compute a step of PowerSGD on the CPU, matrix by matrix, with torch or with the C kernel."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from commhooks.comm.packing import (
    largest_gradient,
    pack_factor,
    put_flags,
    put_overflow,
    put_projection,
)
from commhooks.compressors.native import library
from commhooks.compressors.native.tables import FactorTable, MatrixTable
from commhooks.compressors.powersgd.exchange import BucketPass, PowerSGDWorkspace
from commhooks.gradients.layout import Slot, bytes_of

Tensors = Sequence[torch.Tensor]
Residuals = Sequence[torch.Tensor | None]
Refill = Callable[[int], torch.Tensor]
"""Returns random rows for the matrix with this index, to replace dependent rows."""


class CpuKernel:
    """Implements `LowRankKernel` for matrices that consist of one parameter.

    `copies`: memory for each matrix's delta, n x m; None if delta is computed in the bucket.
    `largest`: the largest absolute gradient of each parameter, or None.
    """

    def __init__(self, work: PowerSGDWorkspace, products: "TorchProducts | NativeProducts") -> None:
        self.work = work
        self.products = products
        self.largest = products.largest
        # Bind `work` and not `self`: a reference cycle would delay freeing the kernel's memory.
        self._refill_p = functools.partial(work.refill, "P")
        self._refill_q = functools.partial(work.refill, "Q")
        self.copies = [
            None if work.in_bucket else torch.zeros(x.n, x.m, dtype=work.dtype)
            for x in work.matrices
        ]
        p, q, ranks = zip(*products.pieces, strict=True)
        self._sent_p = list(zip(p, _pieces(work.first.packed, p), strict=True))
        self._sent_q = list(zip(q, _pieces(work.last.packed, q), ranks, strict=True))
        self._largest_gradient = largest_gradient(work.buffer.dtype)

    def form_p(self, bucket: BucketPass) -> None:
        work = self.work
        flags = bucket.first.flags
        largest = self.largest
        # Write the flags here, unless `products.form_p` computes `largest`.
        if largest is None:
            gradients = [slot.of(bucket.flat) for slot in work.slots]
            put_flags(gradients, flags)
            for gradient, flag in zip(gradients, flags, strict=True):
                put_overflow(gradient, flag)
        # delta = gradient; `products.form_p` adds the residuals that `add_residuals` returns.
        self._load_gradients(bucket)
        residuals = self.add_residuals(bucket) if work.error_feedback else None
        learned = bucket.q if work.warm_start else {}
        q = [
            learned[x.name] if x.name in learned else work.draw_q(x, bucket.step.number)
            for x in work.matrices
        ]
        # Only the span of Q matters. Without the scaling, P would grow with the square of the
        # gradient, because Q is about as large as the gradient of the step before.
        self.products.unit_rows(q, self._refill_q)
        self.products.form_p(bucket.deltas, residuals, float(bucket.step.residual_factor))
        if largest is not None:
            is_nonzero = (largest > 0).double()
            flags.copy_(is_nonzero.masked_fill_(largest > self._largest_gradient, float("nan")))
        for p, out in self._sent_p:
            pack_factor(p, out, bucket.step.world_size)

    def orthonormalize(self, bucket: BucketPass) -> None:
        arrived = [factor.to(self.work.dtype) for factor in bucket.first.factors]
        self.products.orthonormalize(arrived, self._refill_p)

    def form_q(self, bucket: BucketPass) -> None:
        self.products.form_q(bucket.deltas)
        for q, out, rank in self._sent_q:
            put_projection(q, out, bucket.step.world_size, rank=rank)

    def form_remainder(self, bucket: BucketPass) -> None:
        """Do nothing: `reconstruct` reads delta once for the residual and the gradient."""

    def reconstruct(
        self, bucket: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor
    ) -> None:
        work = self.work
        residuals: Tensors | None = None
        idle: list[Slot] = []
        if good:  # learn: Q = mean Q, residual = delta - P Q^T
            places, idle = self.used(bucket)
            mean_q = [self._keep_q(bucket, i) for i in places]
            if work.error_feedback and places:
                residuals = self.residuals_to_write(bucket, places, idle)
        else:  # learn nothing; NaN in Q makes the gradient NaN if this bucket is not finite
            places = list(range(len(work.matrices)))
            mean_q = self.products.q
            nan_if_bad = torch.where(finite, 0.0, float("nan")).to(work.dtype)
            for q, arrived in zip(mean_q, bucket.last.factors, strict=True):
                q.copy_(arrived).add_(nan_if_bad)
        # The residuals first, because the gradient P mean_Q^T then overwrites delta.
        deltas = [bucket.deltas[i] for i in places]
        self.products.reconstruct(places, deltas, residuals, mean_q)
        for i in () if work.in_bucket else places:
            bucket.gradients[i].copy_(bucket.deltas[i].view(-1)[: len(bucket.gradients[i])])
        factor = float(bucket.step.residual_factor)
        for slot in idle:  # keep their residuals, rescaled to the current loss scale
            if slot.name in bucket.residuals and factor != 1:
                bucket.residuals[slot.name].mul_(factor)
            slot.of(bucket.flat).zero_()

    # ---- overridden for batched PowerSGD ---------------------------------------------------------

    def add_residuals(self, bucket: BucketPass) -> Residuals | None:
        return [bucket.residuals.get(slot.name) for slot in self.work.slots]

    def residuals_to_write(
        self, bucket: BucketPass, places: Sequence[int], idle: Sequence[Slot]
    ) -> Tensors | None:
        return [self.residual(bucket, self.work.slots[i]) for i in places]

    # ---- parts of the steps ----------------------------------------------------------------------

    def _load_gradients(self, bucket: BucketPass) -> None:
        bucket.deltas = []
        matrices = zip(self.copies, bucket.gradients, self.work.matrices, strict=True)
        for copy, gradient, matrix in matrices:
            if copy is not None:
                copy.view(-1)[: len(gradient)].copy_(gradient)
                copy.view(-1)[len(gradient) :].zero_()
            bucket.deltas.append(gradient.view(matrix.n, matrix.m) if copy is None else copy)

    def used(self, bucket: BucketPass) -> tuple[list[int], list[Slot]]:
        """Return the indices of the matrices with a gradient on some rank, and the other slots."""
        used = (bucket.first.flags > 0).tolist()
        places = [i for i, flags in enumerate(self.work.flags_of) if any(used[flags])]
        slots = zip(self.work.slots, used, strict=True)
        return places, [slot for slot, is_used in slots if not is_used]

    def _keep_q(self, bucket: BucketPass, i: int) -> torch.Tensor:
        name = self.work.matrices[i].name
        arrived = bucket.last.factors[i]
        if name not in bucket.q:
            bucket.q[name] = torch.empty_like(arrived, dtype=self.work.dtype)
        return bucket.q[name].copy_(arrived)

    def residual(self, bucket: BucketPass, slot: Slot) -> torch.Tensor:
        if slot.name not in bucket.residuals:
            bucket.residuals[slot.name] = torch.zeros(slot.numel, dtype=self.work.dtype)
        return bucket.residuals[slot.name]


def _pieces(packed: torch.Tensor, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    pieces = packed.split([factor.numel() for factor in like])
    return [piece.view_as(factor) for piece, factor in zip(pieces, like, strict=True)]


# ---- the products, with torch --------------------------------------------------------------------


class TorchProducts:
    """Computes the products with torch.

    It calls one `mm` per matrix, never a batch, and on aligned memory, because bits can depend on
    both. `shapes`: n, m and rank of each matrix.

    A factor of rank 1 is padded with a row of zeros: for products with a single row the BLAS would
    use another algorithm, whose bits depend on the alignment of the memory.

    Attributes:
        p, q: the factors of all matrices, `r x n` and `r x m`.
        pieces: (P, Q, rank) of the factors that are packed into a message in one call.
        largest: per matrix the largest absolute gradient, float64, ignoring NaN, set by `form_p`;
            None: not computed.
    """

    largest: torch.Tensor | None = None

    def __init__(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> None:
        self._p = [torch.zeros(max(r, 2), n, dtype=dtype) for n, _, r in shapes]
        self._q = [torch.zeros(max(r, 2), m, dtype=dtype) for _, m, r in shapes]
        self.p = [padded[:r] for padded, (_, _, r) in zip(self._p, shapes, strict=True)]
        self.q = [padded[:r] for padded, (_, _, r) in zip(self._q, shapes, strict=True)]
        self.pieces = [(p, q, len(p)) for p, q in zip(self.p, self.q, strict=True)]

    def unit_rows(self, sources: Tensors, refill: Refill) -> None:
        """Set q to the rows of `sources` (r x m), scaled to norm 1.

        Rows of `refill` replace zero rows.
        """
        for i, rows in enumerate(sources):
            self._set(self._q[i], _filled_unit_rows(rows, functools.partial(refill, i)))

    def orthonormalize(self, sources: Tensors, refill: Refill) -> None:
        """Set p to orthonormal bases of the rows of `sources` (r x n)."""
        for i, rows in enumerate(sources):
            self._set(self._p[i], _basis(rows, functools.partial(refill, i)))

    def form_p(self, deltas: Tensors, residuals: Residuals | None, factor: float) -> None:
        """Compute delta += factor * residual in place, then P = delta Q.

        Deltas are n x m, residuals flat or None.
        """
        residuals = residuals or [None] * len(deltas)
        for p, q, delta, residual in zip(self._p, self._q, deltas, residuals, strict=True):
            if residual is not None:
                delta.view(-1).add_(residual, alpha=factor)
            torch.mm(q, delta.t(), out=p)

    def form_q(self, deltas: Tensors) -> None:
        for p, q, delta in zip(self._p, self._q, deltas, strict=True):
            torch.mm(p, delta, out=q)

    def reconstruct(
        self,
        places: Sequence[int],
        deltas: Tensors,
        residuals: Tensors | None,
        mean_q: Tensors | None,
    ) -> None:
        """Compute residual = delta - P Q^T, then delta = P mean_Q^T.

        The first only if `residuals` are given, the second only if `mean_q` is given. The lists
        have one tensor per element of `places`, the indices of matrices.
        """
        for k, i in enumerate(places):
            if residuals is not None:
                remainder(deltas[k], self.p[i], self.q[i], out=residuals[k].view_as(deltas[k]))
            if mean_q is not None:
                reconstruct(self.p[i], mean_q[k], out=deltas[k])

    @staticmethod
    def _set(padded: torch.Tensor, rows: torch.Tensor) -> None:
        padded[: len(rows)] = rows
        # reset the padding row of rank 1, which an inf in delta turns into NaN
        if len(rows) < len(padded):
            padded[len(rows) :].zero_()


def unit_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row of `rows` (r x k) to norm 1; zero rows stay zero.

    Return the result, and which rows are zero (r x 1, bool).

    Divides by the largest element first, because in float32 the square of 1e30 overflows and the
    square of 1e-38 is 0.
    """
    # vector_norm(inf) with a dim is seven times slower on CPU
    largest = rows.abs().amax(1, keepdim=True)
    missing = largest == 0
    scaled = rows / torch.where(missing, torch.ones_like(largest), largest)
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / torch.where(missing, torch.ones_like(norm), norm), missing


def orthonormal_rows(
    rows: torch.Tensor, refill: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormalise `rows` (r x k, r <= k).

    Return the basis (r x k) and which rows were dependent (r, bool).

    Householder QR turns a row that is a combination of the rows before it into an arbitrary
    orthonormal row, made of rounding errors. If `refill` (r x k, independent rows) is given, its
    rows replace such rows, and the result is orthonormalised again. Non-finite numbers count as
    zero.
    """
    rows = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    basis, triangle = torch.linalg.qr(unit_rows(rows)[0].t())
    missing = triangle.diagonal().abs() <= 10 * torch.finfo(rows.dtype).eps
    if refill is not None:
        basis, _ = torch.linalg.qr(torch.where(missing, unit_rows(refill)[0].t(), basis))
    return basis.t(), missing


def _filled_unit_rows(rows: torch.Tensor, refill: Callable[[], torch.Tensor]) -> torch.Tensor:
    unit, missing = unit_rows(rows)
    return torch.where(missing, unit_rows(refill())[0], unit) if missing.any() else unit


def _basis(rows: torch.Tensor, refill: Callable[[], torch.Tensor]) -> torch.Tensor:
    basis, missing = orthonormal_rows(rows, None)
    return orthonormal_rows(rows, refill())[0] if missing.any() else basis


# Up to this rank, r outer products are faster than a matrix product. They need no padding, because
# their bits do not depend on the alignment of memory. They run block by block, so that a block
# stays in the cache.
_OUTER_RANK = 4
_BLOCK_NUMEL = 2**18


def reconstruct(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Write P Q^T into `out` (n x m), given `p` (r x n) and `q` (r x m)."""
    if len(p) > _OUTER_RANK:
        torch.mm(p.t(), q, out=out)
        return
    for rows in _row_blocks(out):
        block = out[rows]
        torch.mul(p[0, rows, None], q[0], out=block)
        for k in range(1, len(p)):
            block.addcmul_(p[k, rows, None], q[k])


def remainder(delta: torch.Tensor, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Write delta - P Q^T into `out` (n x m), which may be `delta` itself."""
    if len(p) > _OUTER_RANK:
        torch.addmm(delta, p.t(), q, alpha=-1, out=out)
        return
    for rows in _row_blocks(out):
        block = out[rows]
        torch.addcmul(delta[rows], p[0, rows, None], q[0], value=-1, out=block)
        for k in range(1, len(p)):
            block.addcmul_(p[k, rows, None], q[k], value=-1)


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    n, m = matrix.shape
    height = max(1, _BLOCK_NUMEL // m)
    return (slice(begin, min(begin + height, n)) for begin in range(0, n, height))


# ---- the products, with the C kernel, native/powersgd.c ------------------------------------------


class NativeProducts:
    """Computes the same as `TorchProducts`, up to rounding, with the C library.

    One call for all matrices reads each matrix once. P and Q are packed as they are sent.
    `refills`: whether the C library also replaces dependent rows of P; otherwise torch does.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, *, refills: bool = True
    ) -> None:
        self._dtype = dtype
        self._refills = refills
        self._least_norm = 10 * torch.finfo(dtype).eps
        p, self.p = _packed([(r, n) for n, _, r in shapes], dtype)
        q, self.q = _packed([(r, m) for _, m, r in shapes], dtype)
        runs = [list(run) for _, run in itertools.groupby(shapes, key=lambda shape: shape[2])]
        parts_p = p.split([sum(r * n for n, _, r in run) for run in runs])
        parts_q = q.split([sum(r * m for _, m, r in run) for run in runs])
        self.pieces = [(p, q, run[0][2]) for p, q, run in zip(parts_p, parts_q, runs, strict=True)]
        self._matrices = MatrixTable(shapes, dtype)
        self._matrices.point(p=self.p, q=self.q)
        self.largest = self._matrices.column("largest").view(torch.float64)
        self._rows_p = _to(self.p, dtype)
        self._rows_q = _to(self.q, dtype)

    def unit_rows(self, sources: Tensors, refill: Refill) -> None:
        for i in self._unit_rows(self._rows_q, sources, orthogonal=False):
            self.q[i].copy_(_filled_unit_rows(sources[i], functools.partial(refill, i)))

    def orthonormalize(self, sources: Tensors, refill: Refill) -> None:
        for i in self._unit_rows(self._rows_p, sources, orthogonal=True):
            rows = sources[i]
            out = self.p[i]
            if self._refills:
                random_rows = refill(i)
                table = _to([out], self._dtype)
                table.point(refill=[random_rows])
                if self._unit_rows(table, [rows], orthogonal=True):
                    out.copy_(orthonormal_rows(rows, random_rows)[0])
            else:
                out.copy_(_basis(rows, functools.partial(refill, i)))

    def form_p(self, deltas: Tensors, residuals: Residuals | None, factor: float) -> None:
        self._matrices.point(delta=deltas, residual=residuals)
        self._matrices.run("form_p", factor)

    def form_q(self, deltas: Tensors) -> None:
        self._matrices.point(delta=deltas)
        self._matrices.run("form_q")

    def reconstruct(
        self,
        places: Sequence[int],
        deltas: Tensors,
        residuals: Tensors | None,
        mean_q: Tensors | None,
    ) -> None:
        table = self._matrices.only(places)
        table.point(delta=deltas, residual=residuals, mean_q=mean_q)
        table.run("split")

    def _unit_rows(self, table: FactorTable, sources: Tensors, *, orthogonal: bool) -> list[int]:
        table.point(source=sources)
        table.run("unit_rows", orthogonal, self._least_norm if orthogonal else 0.0)
        missing = table.missing.tolist()
        return [i for i, rows in enumerate(missing) if rows] if any(missing) else []


def _packed(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    numels = [r * length for r, length in shapes]
    flat = torch.zeros(sum(numels), dtype=dtype)
    pieces = zip(flat.split(numels), shapes, strict=True)
    return flat, [piece.view(shape) for piece, shape in pieces]


def _to(factors: Tensors, dtype: torch.dtype) -> FactorTable:
    table = FactorTable([tuple(factor.shape) for factor in factors], dtype)
    table.point(to=factors)
    return table


def results_of(dtype: torch.dtype) -> bytes:
    # These shapes run every loop of the kernel: odd lengths, each size of a group of rows, and in
    # the last shape several parts (64 rows), sums of Q (96 rows) and tiles of columns (8,192).
    shapes = ((37, 1061, 1), (37, 1061, 2), (37, 1061, 3), (37, 1061, 4), (101, 8209, 6))
    numbers = library.fixed_numbers(2 + max(n * m for n, m, _ in shapes), 0, dtype)
    results = []
    for n, m, rank in shapes:
        products = NativeProducts([(n, m, rank)], dtype)
        delta, residual = (numbers[start : start + n * m].view(n, m).clone() for start in (1, 2))
        products.unit_rows([numbers[: rank * m].view(rank, m)], lambda i: numbers)
        first = products.q[0].clone()
        products.form_p([delta], [residual], 0.7)
        arrived = products.p[0].clone()
        products.orthonormalize([arrived], lambda i: numbers)
        products.form_q([delta])
        results += [first, arrived, products.p[0], products.q[0]]
        products.reconstruct([0], [delta], [residual], [first])
        results += [residual, delta]
    return b"".join(map(bytes_of, results))
