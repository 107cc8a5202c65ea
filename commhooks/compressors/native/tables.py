"""Tables for native kernels: one row of 64-bit fields per piece of work, as a struct in the kernel's source."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

import torch

from commhooks.errors import HookRunError

AnyTable = TypeVar("AnyTable", bound="Table")


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
        width = len(self.fields)
        filled = [[*row, *[0] * (width - len(row))] for row in rows]
        self.rows = torch.tensor(filled, dtype=torch.int64).view(-1, width)
        # The memory of `rows`, for single numbers: an operator of torch takes longer than writing a column of them.
        self._numbers = (ctypes.c_int64 * self.rows.numel()).from_address(self.rows.data_ptr())

    def only(self: AnyTable, places: Sequence[int]) -> AnyTable:
        """The rows at `places`, which ascend: a copy, or this table if these are all."""
        return self if len(places) == len(self) else type(self)(self.rows[list(places)].tolist(), self.dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, field: str) -> torch.Tensor:
        """A field of all rows, int64; a view."""
        return self.rows[:, self.fields.index(field)]

    def point(self, field: str, tensors: Sequence[torch.Tensor | None] | None) -> None:
        """Write the addresses of `tensors`, or 0 for None, into the field. Whoever calls the kernel must keep them."""
        i, j = self.pointers[field]
        place = self.fields.index(field)
        for sizes, tensor in zip(self.sizes, tensors or [None] * len(self.sizes), strict=True):
            self._numbers[place] = 0 if tensor is None else address(tensor, self.dtype, sizes[i] * sizes[j])
            place += len(self.fields)


def address(tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> int:
    """Where the numbers of `tensor` begin. C takes every address from here, and believes what it is told.

    Raises:
        HookRunError: C would not find `numel` numbers of `dtype` there.
    """
    if tensor.dtype != dtype or tensor.numel() < numel or not tensor.is_contiguous() or not tensor.is_cpu:
        raise HookRunError(
            f"the native kernel needs {numel} numbers of {dtype} one after another on the CPU, and got a tensor of "
            f"shape {tuple(tensor.shape)} and stride {tensor.stride()} of {tensor.dtype} on {tensor.device}; "
            "fused=False does without the kernel"
        )
    return tensor.data_ptr()
