"""Define the arguments of the C kernels: tables of 64-bit fields, laid out as in `tables.h`.

Kernels run in the OpenMP threads of torch's operators if torch's library exports `GOMP_parallel`,
as on Linux. A second thread pool would compete with them.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

import torch

from commhooks.compressors.native import library
from commhooks.errors import HookRunError
from commhooks.gradients.profiling import span

AnyTable = TypeVar("AnyTable", bound="Table")
ALL = slice(None)
_GRAIN = 2**15
"""Minimum number of elements per thread, as for torch's operators."""
_IMPORTED_IN = os.getpid()


class Table:
    """Base of the tables.

    `rows`: the values of the first fields in each row; the other fields are 0.

    Attributes:
        fields: the members of the struct, in order.
        pointers: the fields that `point` writes, each with the indices of two fields whose product
            is the number of elements at that address.
        rows: `rows x fields`, int64.
    """

    fields: ClassVar[tuple[str, ...]]
    pointers: ClassVar[Mapping[str, tuple[int, int]]] = {}

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sizes = rows
        self._elements = list(itertools.accumulate(map(self.elements_of, rows), initial=0))
        width = len(self.fields)
        filled = [[*row, *[0] * (width - len(row))] for row in rows]
        self.rows = torch.tensor(filled, dtype=torch.int64).view(-1, width)
        self._functions: dict[str, Callable[..., int]] = {}
        # Views the memory of `rows`: writing a whole column this way takes less time than one torch
        # operator.
        self._numbers = (ctypes.c_int64 * self.rows.numel()).from_address(self.rows.data_ptr())

    @staticmethod
    def elements_of(row: Sequence[int]) -> int:
        raise NotImplementedError

    def only(self: AnyTable, places: Sequence[int]) -> AnyTable:
        """Return a table of the rows at `places` (ascending); this table if these are all rows."""
        if len(places) == len(self.sizes):
            return self
        return type(self)(self.rows[list(places)].tolist(), self.dtype)

    def run(self, function: str, *more: float, rows: slice = ALL) -> None:
        """Call a function of the library for consecutive `rows`, in as many threads as torch uses.

        Raises MemoryError.
        """
        begin, end, _ = rows.indices(len(self.sizes))
        start, threads = team(self._elements[end] - self._elements[begin])
        first = self.rows.data_ptr() + begin * self.rows.stride(0) * self.rows.itemsize
        if function not in self._functions:
            self._functions[function] = library.function(function, self.dtype)
        with span("native kernel", function):
            failed = self._functions[function](start, threads, end - begin, first, *more)
        if failed:
            raise MemoryError("commhooks: no memory for the scratch space of a native kernel")

    def column(self, field: str) -> torch.Tensor:
        return self.rows[:, self.fields.index(field)]

    def point(self, **tensors: Sequence[torch.Tensor | None] | None) -> None:
        """Write the addresses of tensors, or 0 for None, into fields.

        The caller must keep the tensors alive.
        """
        for field, column in tensors.items():
            i, j = self.pointers[field]
            place = self.fields.index(field)
            for sizes, tensor in zip(self.sizes, column or [None] * len(self.sizes), strict=True):
                numel = sizes[i] * sizes[j]
                self._numbers[place] = 0 if tensor is None else address(tensor, self.dtype, numel)
                place += len(self.fields)


class MatrixTable(Table):
    """Lays out `struct matrix`.

    n, m and r, then the addresses of delta and residual (n x m) and of factors (r x n, r x m).
    """

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
    """Lays out `struct factor`.

    r and k, then the addresses of the rows (r x k), of replacements for dependent rows, and of the
    result.
    """

    fields = ("r", "k", "source", "refill", "to", "missing")
    pointers: ClassVar[Mapping[str, tuple[int, int]]] = {
        "source": (0, 1),
        "refill": (0, 1),
        "to": (0, 1),
    }

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self.missing = self.column("missing")

    @staticmethod
    def elements_of(row: Sequence[int]) -> int:
        return row[0] ** 2 * row[1]


class PieceTable(Table):
    """Lays out `struct piece`.

    The number of elements of a piece of a tensor, in whole blocks, the block size, then addresses.
    """

    fields = (
        "numel",
        "block",
        "bucket",
        "residual",
        "codes",
        "scales",
        "arrived_codes",
        "arrived_scales",
    )

    @staticmethod
    def elements_of(row: Sequence[int]) -> int:
        return row[0]


def address(tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> int:
    """Return the address of `tensor`.

    Raise HookRunError unless it holds `numel` contiguous numbers of `dtype` on the CPU: C accesses
    the memory without any other check.
    """
    place = tensor.data_ptr()
    is_contiguous = tensor.is_cpu and tensor.is_contiguous()
    fits = is_contiguous and tensor.dtype == dtype and tensor.numel() >= numel
    # subclasses of tensors, such as DTensor, may have no memory of their own
    if not fits or (numel and not place):
        raise HookRunError(
            f"the native kernel needs {numel} contiguous numbers of {dtype} on the CPU, and got a"
            f" {type(tensor).__name__} of shape {tuple(tensor.shape)} and stride {tensor.stride()}"
            f" of {tensor.dtype} on {tensor.device}; COMMHOOKS_NATIVE=0 turns the kernel off"
        )
    return place


def team(elements: int) -> tuple[int | None, int]:
    """Return the address of `GOMP_parallel`, or None, and the number of threads for `elements`.

    At most as many threads as torch uses in this thread, and 1 if torch's threads cannot be used.
    Results do not depend on either.
    """
    start = _entry_point()
    threads = min(torch.get_num_threads(), max(1, elements // _GRAIN))
    if start is None or threads == 1:
        return start, 1
    # OpenMP hangs in a forked process if the parent had used it, for the kernel or for torch.
    return start, threads if os.getpid() == _IMPORTED_IN else 1


@functools.cache
def _entry_point() -> int | None:
    # torch loads its OpenMP into the global scope, so this finds the library that torch calls.
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    # Another OpenMP; TypeError: Windows has no global scope.
    except (AttributeError, OSError, TypeError):
        return None
