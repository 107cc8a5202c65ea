"""The codec's passes over a matrix as a small native kernel (`native/codec.c`), for the CPU.

Used where all ranks have it (see `native_kernel`). `codec` is the reference; the results are equal up to rounding.
Each pass reads the matrix once, where `codec` reads it several times.
"""

import ctypes
import functools
from pathlib import Path

import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.threads import team
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.kernel_tables import FactorTable, MatrixTable

SOURCE = Path(__file__).parent / "native" / "codec.c"
FLAGS = ("-ffp-contract=fast",)


class FusedCodec:
    """One build of the kernel, for one compute dtype: the functions of `codec` that read or write whole matrices, for
    one matrix (see `codec` for shapes) and for a table of matrices."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._library = library
        number = ctypes.c_double
        for name, more in (
            ("form_p", [number]),
            ("form_q", [number]),
            ("split", []),
            ("unit_rows", [ctypes.c_int, number]),
        ):
            function = getattr(library, f"commhooks_{name}")
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, *more]
            function.restype = ctypes.c_int

    # ---- tables ----------------------------------------------------------------------------------------------------

    def form_p_of(self, table: MatrixTable, factor: float) -> None:
        """`add_and_project_p` for all matrices of `table`, from `q` to `p`. Sets `table.largest`."""
        self._call("form_p", table, factor)

    def form_q_of(self, table: MatrixTable, factor: float) -> None:
        """`add_and_project_q` for all matrices of `table`, from `p` to `q`; a residual that is 0 is none."""
        self._call("form_q", table, factor)

    def split_of(self, table: MatrixTable) -> None:
        """`split`; without the residual where that field is 0, and without the gradient where `mean_q` is 0."""
        self._call("split", table)

    def unit_rows_of(self, table: FactorTable, *, orthogonal: bool) -> None:
        """Scale rows to norm 1 and, if `orthogonal`, orthonormalise them. Non-finite numbers count as zero. Sets
        `table.missing`: rows that are zero or dependent; the result is of use only where that is 0."""
        least = 10 * torch.finfo(self.dtype).eps if orthogonal else 0.0
        self._call("unit_rows", table, orthogonal, least)

    def _call(self, name: str, table: MatrixTable | FactorTable, *more: float) -> None:
        start, threads = team(table.elements)
        if getattr(self._library, f"commhooks_{name}")(start, threads, len(table), table.rows.data_ptr(), *more):
            raise MemoryError(f"commhooks: no memory for the scratch space of {name}")

    # ---- one matrix ------------------------------------------------------------------------------------------------

    def add_and_project_p(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        factor: float,
        q: torch.Tensor,
        rank: int,
        out: torch.Tensor,
    ) -> None:
        self.form_p_of(self._matrix(rank, delta, residual, out, q), factor)

    def add_and_project_q(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        factor: float,
        p: torch.Tensor,
        rank: int,
        out: torch.Tensor,
    ) -> None:
        self.form_q_of(self._matrix(rank, delta, residual, p, out), factor)

    def split(
        self,
        delta: torch.Tensor,
        local: codec.Factors,
        mean: codec.Factors,
        rank: int,
        residual: torch.Tensor,
    ) -> None:
        self.split_of(self._matrix(rank, delta, residual, *local, *mean))

    def reconstruct(self, p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        self.split_of(self._matrix(rank, out, None, p, q, p, q))

    def remainder(self, delta: torch.Tensor, p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        self.split_of(self._matrix(rank, delta, out, p, q, p, None))

    def unit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._unit_rows(rows, None, False) or codec.unit_rows(rows)

    def orthonormal_rows(
        self, rows: torch.Tensor, refill: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._unit_rows(rows, refill, True) or codec.orthonormal_rows(rows, refill)

    def _matrix(self, rank: int, *tensors: torch.Tensor | None) -> MatrixTable:
        delta = tensors[0]
        assert delta is not None
        return MatrixTable.of_one([*delta.shape, rank], tensors, self.dtype)

    def _unit_rows(
        self, rows: torch.Tensor, refill: torch.Tensor | None, orthogonal: bool
    ) -> tuple[torch.Tensor, None] | None:
        """None if there are rows that are zero or dependent, and were not replaced."""
        rows, out = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
        table = FactorTable.of_one(rows.shape, (rows, refill, out), self.dtype)
        self.unit_rows_of(table, orthogonal=orthogonal)
        return None if any(table.missing) else (out, None)


@functools.cache
def load(dtype: torch.dtype = torch.float32) -> FusedCodec:
    """Load the kernel for a compute dtype, float32 or float64; compile it first if the cache does not hold it.

    Raises:
        HookConfigError: see `library.load`.
    """
    return FusedCodec(library.load(SOURCE, FLAGS, dtype), dtype)
