"""Tables for native kernels: one row of 64-bit fields per piece of work, as a struct in the kernel's source. A function
of a kernel works on some rows, which torch's threads share.

torch's operators run in the threads of an OpenMP library that torch loads. Where it has the entry point
`GOMP_parallel`, as it has on Linux, kernels run in the same threads. A second pool would compete with the first.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeVar

import torch

from commhooks.errors import HookRunError

AnyTable = TypeVar("AnyTable", bound="Table")
ALL = slice(None)
ARGUMENTS = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
"""The first ones of each function of a kernel, which `Table.run` passes."""
_GRAIN = 2**15
"""Elements per thread, at least: as many as torch's operators ask for."""
_IMPORTED_IN = os.getpid()


class Table:
    """
    Args:
        rows: each holds the values of the first fields; the others are 0.
        dtype: of the numbers that `pointers` point to.

    Attributes:
        fields: the members of the struct, in order.
        pointers: the fields that `point` writes, in order, after those that hold sizes. Each points to as many numbers
            as the product of two sizes, the fields with these two places.
        sizes: the first fields of each row, as given.
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
        # The memory of `rows`, for single numbers: an operator of torch takes longer than writing a column of them.
        self._numbers = (ctypes.c_int64 * self.rows.numel()).from_address(self.rows.data_ptr())

    @staticmethod
    def elements_of(row: Sequence[int]) -> int:
        """About how many elements the work on a row takes, by its sizes."""
        raise NotImplementedError

    def only(self: AnyTable, places: Sequence[int]) -> AnyTable:
        """The rows at `places`, which ascend: a copy, or this table if these are all."""
        return self if len(places) == len(self.sizes) else type(self)(self.rows[list(places)].tolist(), self.dtype)

    def run(self, function: Callable[..., int], *more: float, rows: slice = ALL) -> None:
        """Call a function of a kernel for `rows`, which follow one another, in as many threads as torch would use.

        Raises:
            MemoryError: there is none for its scratch space.
        """
        begin, end, _ = rows.indices(len(self.sizes))
        start, threads = team(self._elements[end] - self._elements[begin])
        address_of_first = self.rows.data_ptr() + begin * self.rows.stride(0) * self.rows.itemsize
        if function(start, threads, end - begin, address_of_first, *more):
            raise MemoryError("commhooks: no memory for the scratch space of a native kernel")

    def column(self, field: str) -> torch.Tensor:
        """A field of all rows, int64; a view."""
        return self.rows[:, self.fields.index(field)]

    def point(self, **tensors: Sequence[torch.Tensor | None] | None) -> None:
        """Write the addresses of the tensors, or 0 for None, into fields. Whoever calls the kernel must keep them."""
        for field, each in tensors.items():
            i, j = self.pointers[field]
            place = self.fields.index(field)
            for sizes, tensor in zip(self.sizes, each or [None] * len(self.sizes), strict=True):
                self._numbers[place] = 0 if tensor is None else address(tensor, self.dtype, sizes[i] * sizes[j])
                place += len(self.fields)


def address(tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> int:
    """Where the numbers of `tensor` begin. C takes every address from here, and believes what it is told.

    Raises:
        HookRunError: C would not find `numel` numbers of `dtype` there.
    """
    place = tensor.data_ptr()
    fits = tensor.dtype == dtype and tensor.numel() >= numel and tensor.is_contiguous() and tensor.is_cpu
    if not fits or (numel and not place):  # subclasses of tensors, such as DTensor, may have no memory of their own
        raise HookRunError(
            f"the native kernel needs {numel} numbers of {dtype} one after another on the CPU, and got a tensor of "
            f"shape {tuple(tensor.shape)} and stride {tensor.stride()} of {tensor.dtype} on {tensor.device}; "
            "COMMHOOKS_NATIVE=0 does without the kernel"
        )
    return place


def team(elements: int) -> tuple[int | None, int]:
    """The address of `GOMP_parallel` (None: there is none) and how many threads should share work on so many elements,
    when called from this thread: at most as many as torch has, and 1 where torch's cannot be used. The results do not
    depend on it."""
    start = _entry_point()
    threads = min(torch.get_num_threads(), max(1, elements // _GRAIN))
    if start is None or threads == 1:
        return start, 1
    # OpenMP waits for ever in a process that was forked from one in which it had run, for the kernel or for torch.
    return start, threads if os.getpid() == _IMPORTED_IN else 1


@functools.cache
def _entry_point() -> int | None:
    # torch loads its OpenMP into the global scope, so this finds the one that torch calls.
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):  # another OpenMP; TypeError: Windows has no global scope
        return None
