"""The tables for the native kernel: one row of 64-bit fields per matrix, as the structs in `native/tables.h`."""

from collections.abc import Sequence
from typing import ClassVar

import torch


class _Table:
    fields: ClassVar[tuple[str, ...]]

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        """Each of `rows` holds the values of the first fields; the others are 0."""
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


class MatrixTable(_Table):
    """Matrices: `n`, `m` and `r`, then the addresses of delta and residual (n x m) and of factors (r x n and r x m)."""

    fields = ("n", "m", "r", "delta", "residual", "p", "q", "mean_p", "mean_q", "scratch", "largest")

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        super().__init__(rows)
        self.elements = sum(row[0] * row[1] for row in rows)

    @property
    def largest(self) -> torch.Tensor:
        """Per matrix the largest absolute value that delta had before the residual was added, float64; NaN does not
        count."""
        return self.column("largest").view(torch.float64)

    def only(self, places: Sequence[int]) -> "MatrixTable":
        """The rows at `places`, which ascend: a copy, or this table if these are all."""
        if len(places) == len(self):
            return self
        return MatrixTable(self.rows[list(places)].tolist())


class FactorTable(_Table):
    """Factors r x k: where their rows are, rows to replace dependent ones (or 0), and where the results go."""

    fields = ("r", "k", "source", "refill", "to", "missing")

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        super().__init__(rows)
        self.elements = sum(row[0] ** 2 * row[1] for row in rows)

    @property
    def missing(self) -> list[int]:
        """Per factor the number of its rows that are dependent and were not replaced."""
        found: list[int] = self.column("missing").tolist()
        return found


def address(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
