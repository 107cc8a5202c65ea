"""The products with the matrices of a bucket, with the native kernel (`native/codec.c`), for the CPU.

Used where all ranks have it, in the same build. The results of `torch_products` are equal up to rounding. Each pass
reads a matrix once, where torch reads it several times.
"""

import ctypes
import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.tables import ARGUMENTS, Table
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.torch_products import Refill, Residuals, Tensors

SOURCE = Path(__file__).parent / "native" / "codec.c"
FLAGS = ("-ffp-contract=fast",)


class MatrixTable(Table):
    """`struct matrix` in `native/tables.h`: `n`, `m` and `r`, then the addresses of delta and residual (n x m) and of
    factors (r x n and r x m)."""

    fields = ("n", "m", "r", "delta", "residual", "p", "q", "mean_q", "scratch", "largest")
    pointers: ClassVar[Mapping[str, tuple[int, int]]] = {
        "delta": (0, 1),
        "residual": (0, 1),
        "p": (2, 0),
        "q": (2, 1),
        "mean_q": (2, 1),
    }

    @staticmethod
    def elements_of(row: Sequence[int]) -> int:
        return row[0] * row[1]


class FactorTable(Table):
    """`struct factor`: factors r x k, where their rows are, rows to replace dependent ones (or 0), and where the
    results go."""

    fields = ("r", "k", "source", "refill", "to", "missing")
    pointers: ClassVar[Mapping[str, tuple[int, int]]] = {"source": (0, 1), "refill": (0, 1), "to": (0, 1)}

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self.missing = self.column("missing")

    @staticmethod
    def elements_of(row: Sequence[int]) -> int:
        return row[0] ** 2 * row[1]


class NativeProducts:
    """As `TorchProducts`, for all matrices in one call. P and Q lie packed, as they are sent.

    Args:
        kernel: from `load`, for this compute dtype.
        refills: replace dependent rows of P in the kernel, too; otherwise with torch.
    """

    def __init__(
        self,
        kernel: ctypes.CDLL,
        shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        *,
        refills: bool = True,
    ) -> None:
        self._kernel, self._dtype, self._refills = kernel, dtype, refills
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
        self._rows_p, self._rows_q = _to(self.p, dtype), _to(self.q, dtype)

    def unit_rows(self, sources: Tensors, refill: Refill) -> None:
        for i in self._unit_rows(self._rows_q, sources, orthogonal=False):
            self.q[i].copy_(codec.filled_unit_rows(sources[i], functools.partial(refill, i)))

    def orthonormalize(self, sources: Tensors, refill: Refill) -> None:
        for i in self._unit_rows(self._rows_p, sources, orthogonal=True):
            rows, out = sources[i], self.p[i]
            if self._refills:
                other = refill(i)
                table = _to([out], self._dtype)
                table.point(refill=[other])
                if self._unit_rows(table, [rows], orthogonal=True):
                    out.copy_(codec.orthonormal_rows(rows, other)[0])
            else:
                out.copy_(codec.basis(rows, functools.partial(refill, i)))

    def form_p(self, deltas: Tensors, residuals: Residuals | None, factor: float) -> None:
        self._matrices.point(delta=deltas, residual=residuals)
        self._matrices.run(self._kernel.commhooks_form_p, factor)

    def form_q(self, deltas: Tensors) -> None:
        self._matrices.point(delta=deltas)
        self._matrices.run(self._kernel.commhooks_form_q)

    def split(
        self,
        places: Sequence[int],
        deltas: Tensors,
        residuals: Tensors | None,
        mean_q: Tensors | None,
    ) -> None:
        table = self._matrices.only(places)
        table.point(delta=deltas, residual=residuals, mean_q=mean_q)
        table.run(self._kernel.commhooks_split)

    def _unit_rows(self, table: FactorTable, sources: Tensors, *, orthogonal: bool) -> list[int]:
        """Scale rows to norm 1 and, if `orthogonal`, orthonormalise them. Non-finite numbers count as zero. Returns the
        places of useless results: some of their rows are zero or dependent, and were not replaced."""
        table.point(source=sources)
        table.run(self._kernel.commhooks_unit_rows, orthogonal, self._least_norm if orthogonal else 0.0)
        missing = table.missing.tolist()
        return [i for i, rows in enumerate(missing) if rows] if any(missing) else []


@functools.cache
def load(dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """Load the kernel for a compute dtype, float32 or float64; compile it first if the cache does not hold it.

    Raises:
        HookConfigError: see `library.load`.
    """
    loaded = library.load(SOURCE, FLAGS, dtype)
    loaded.commhooks_form_p.argtypes = [*ARGUMENTS, ctypes.c_double]
    loaded.commhooks_form_q.argtypes = loaded.commhooks_split.argtypes = ARGUMENTS
    loaded.commhooks_unit_rows.argtypes = [*ARGUMENTS, ctypes.c_int, ctypes.c_double]
    return loaded


def build() -> str:
    """`Kernel.build` of this machine. Raises HookConfigError if the kernel cannot be loaded."""
    return library.build_of(SOURCE, lambda dtype: results_of(load(dtype), dtype))


@functools.cache
def results_of(kernel: ctypes.CDLL, dtype: torch.dtype) -> bytes:
    """What the kernel computes from fixed numbers.

    Two builds of one source differ in the last bits: the length of the processor's vectors determines the order of the
    sums, and the compiler decides which multiplications and additions it joins. Results show both, flags and versions
    do not.
    """
    # Odd lengths, each size of a group of rows, and once several parts (64 rows), sums of Q (96 rows) and tiles of
    # columns (8,192): every loop of the kernel runs.
    shapes = ((37, 1061, 1), (37, 1061, 2), (37, 1061, 3), (37, 1061, 4), (101, 8209, 6))
    numbers = library.fixed_numbers(2 + max(n * m for n, m, _ in shapes), 0, dtype)
    results = []
    for n, m, rank in shapes:
        products = NativeProducts(kernel, [(n, m, rank)], dtype)
        delta, residual = (numbers[start : start + n * m].view(n, m).clone() for start in (1, 2))
        products.unit_rows([numbers[: rank * m].view(rank, m)], lambda i: numbers)
        first = products.q[0].clone()
        products.form_p([delta], [residual], 0.7)
        arrived = products.p[0].clone()
        products.orthonormalize([arrived], lambda i: numbers)
        products.form_q([delta])
        results += [first, arrived, products.p[0], products.q[0]]
        products.split([0], [delta], [residual], [first])
        results += [residual, delta]
    return b"".join(each.numpy().tobytes() for each in results)


def _packed(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A 1-D tensor for factors of these shapes, and a view of it per factor."""
    numels = [r * length for r, length in shapes]
    flat = torch.zeros(sum(numels), dtype=dtype)
    return flat, [piece.view(shape) for piece, shape in zip(flat.split(numels), shapes, strict=True)]


def _to(factors: Tensors, dtype: torch.dtype) -> FactorTable:
    table = FactorTable([tuple(factor.shape) for factor in factors], dtype)
    table.point(to=factors)
    return table
