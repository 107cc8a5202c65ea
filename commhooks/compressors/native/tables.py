"""Tables for native kernels: one row of 64-bit fields per piece of work, as a struct in the kernel's source."""

from collections.abc import Sequence
from typing import ClassVar

import torch


class Table:
    """
    Args:
        rows: each holds the values of the first fields; the others are 0.

    Attributes:
        fields: the members of the struct, in order.
        rows: `rows x fields`, int64.
    """

    fields: ClassVar[tuple[str, ...]]

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        width = len(self.fields)
        filled = [[*row, *[0] * (width - len(row))] for row in rows]
        self.rows = torch.tensor(filled, dtype=torch.int64).view(-1, width)

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, field: str) -> torch.Tensor:
        """A field of all rows, int64; a view."""
        return self.rows[:, self.fields.index(field)]

    def point(self, field: str, tensors: Sequence[torch.Tensor | None]) -> None:
        """Write the addresses of `tensors`, or 0 for None, into the field. Whoever calls the kernel must keep them."""
        self.column(field).copy_(torch.tensor([0 if x is None else address(x) for x in tensors]))

    def point_from(self, field: str, start: int, offsets: torch.Tensor) -> None:
        """Write the address `start` plus `offsets` (bytes, one per row) into the field."""
        torch.add(offsets, start, out=self.column(field))


def address(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
