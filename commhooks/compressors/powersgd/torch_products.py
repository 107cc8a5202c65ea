"""The products with the matrices of a bucket, with torch."""

from collections.abc import Callable, Sequence

import torch

from commhooks.compressors.powersgd import codec

Tensors = Sequence[torch.Tensor]
Residuals = Sequence[torch.Tensor | None]
Refill = Callable[[int], torch.Tensor]
"""Random rows, on the CPU, for the matrix with this place, where its own are dependent."""


class TorchProducts:
    """One `mm` per matrix, never a batch, and on aligned memory, because bits can depend on both.

    A factor of rank 1 is padded to two rows with a row of zeros: the BLAS computes products with a single row in
    another way, and their bits depend on the alignment of the memory.

    Args:
        shapes: n, m and rank of each matrix.

    Attributes:
        p, q: the factors of all matrices, `r x n` and `r x m`: results, and operands of what follows.
        pieces: the factors as they are divided and clamped at once: P, Q, and their rank.
        largest: per matrix the largest absolute value of its gradient, float64, found by `form_p`; NaN does not count.
            None: these products do not find it.
    """

    largest: torch.Tensor | None = None

    def __init__(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> None:
        self._p = [torch.zeros(max(r, 2), n, dtype=dtype) for n, _, r in shapes]
        self._q = [torch.zeros(max(r, 2), m, dtype=dtype) for _, m, r in shapes]
        self.p = [padded[:r] for padded, (_, _, r) in zip(self._p, shapes, strict=True)]
        self.q = [padded[:r] for padded, (_, _, r) in zip(self._q, shapes, strict=True)]
        self.pieces = [(p, q, len(p)) for p, q in zip(self.p, self.q, strict=True)]

    def unit_rows(self, sources: Tensors, refill: Refill) -> None:
        """`q` = the rows of `sources` (r x m), scaled to norm 1, with those of `refill` in the places of zero rows."""
        for i, rows in enumerate(sources):
            self._set(self._q[i], codec.filled_unit_rows(rows, lambda: refill(i)))  # noqa: B023 called at once

    def orthonormalize(self, sources: Tensors, refill: Refill) -> None:
        """`p` = orthonormal bases of the rows of `sources` (r x n)."""
        for i, rows in enumerate(sources):
            self._set(self._p[i], codec.basis(rows, lambda: refill(i)))  # noqa: B023 called at once

    def form_p(self, deltas: Tensors, residuals: Residuals | None, factor: float) -> None:
        """delta += factor * residual in place, then P = delta Q. `deltas`: n x m; `residuals`: flat, or None for the
        matrices that have none."""
        for p, q, delta, residual in zip(self._p, self._q, deltas, residuals or [None] * len(deltas), strict=True):
            if residual is not None:
                delta.view(-1).add_(residual, alpha=factor)
            torch.mm(q, delta.t(), out=p)

    def form_q(self, deltas: Tensors) -> None:
        """Q = delta^T P."""
        for p, q, delta in zip(self._p, self._q, deltas, strict=True):
            torch.mm(p, delta, out=q)

    def split(
        self,
        places: Sequence[int],
        deltas: Tensors,
        residuals: Tensors | None,
        mean_q: Tensors | None,
    ) -> None:
        """residual = delta - P Q^T if there are residuals, then delta = P mean_Q^T if there is a mean Q, for the
        matrices at `places`. The lists hold a tensor for each place."""
        for k, i in enumerate(places):
            if residuals is not None:
                codec.remainder(deltas[k], self.p[i], self.q[i], out=residuals[k].view_as(deltas[k]))
            if mean_q is not None:
                codec.reconstruct(self.p[i], mean_q[k], out=deltas[k])

    @staticmethod
    def _set(padded: torch.Tensor, rows: torch.Tensor) -> None:
        padded[: len(rows)] = rows
        if len(rows) < len(padded):  # the padding row of rank 1: an inf in delta turns it into NaN
            padded[len(rows) :].zero_()
