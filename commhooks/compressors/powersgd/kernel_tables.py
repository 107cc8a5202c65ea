"""The tables for the native kernel: one row per matrix, as the structs in `native/tables.h`."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from commhooks.compressors.native.tables import Table


class MatrixTable(Table):
    """Matrices: `n`, `m` and `r`, then the addresses of delta and residual (n x m) and of factors (r x n and r x m) of
    the compute dtype."""

    fields = ("n", "m", "r", "delta", "residual", "p", "q", "mean_p", "mean_q", "scratch", "largest")

    pointers: ClassVar[Mapping[str, tuple[int, int]]] = {
        "delta": (0, 1),
        "residual": (0, 1),
        "p": (2, 0),
        "q": (2, 1),
        "mean_p": (2, 0),
        "mean_q": (2, 1),
    }

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
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
        return MatrixTable(self.rows[list(places)].tolist(), self.dtype)


class FactorTable(Table):
    """Factors r x k: where their rows are, rows to replace dependent ones (or 0), and where the results go."""

    fields = ("r", "k", "source", "refill", "to", "missing")

    pointers: ClassVar[Mapping[str, tuple[int, int]]] = {"source": (0, 1), "refill": (0, 1), "to": (0, 1)}

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self.elements = sum(row[0] ** 2 * row[1] for row in rows)

    @property
    def missing(self) -> list[int]:
        """Per factor the number of its rows that are dependent and were not replaced."""
        found: list[int] = self.column("missing").tolist()
        return found
