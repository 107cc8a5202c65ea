"""The gradients of a bucket as matrices, which PowerSGD compresses."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commhooks.gradients.layout import Slot


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix to compress: `n x m` at `rank`, made of the gradients in `slots`.

    Per-parameter PowerSGD: one slot of n * m elements. Batched PowerSGD: all slots of a bucket, padded with zeros to a
    square.
    """

    name: str
    slots: tuple[Slot, ...]
    """The parameters in the matrix, adjacent in the bucket."""
    n: int
    m: int
    rank: int

    @property
    def start(self) -> int:
        return self.slots[0].offset

    @property
    def stop(self) -> int:
        return self.slots[-1].stop

    @property
    def fills_bucket_span(self) -> bool:
        return self.stop - self.start == self.n * self.m


def by_shape(matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Group matrices by shape and rank; groups are in the order of their first matrices."""

    def shape(matrix: Matrix) -> tuple[int, int, int]:
        return matrix.n, matrix.m, matrix.rank

    first: dict[tuple[int, int, int], int] = {}
    for i, matrix in enumerate(matrices):
        first.setdefault(shape(matrix), i)
    ordered = sorted(matrices, key=lambda matrix: first[shape(matrix)])
    return [list(group) for _, group in itertools.groupby(ordered, key=shape)]


def flags_of(matrices: Iterable[Matrix]) -> list[slice]:
    """Per matrix the places of its parameters among those of all matrices."""
    counts = [len(matrix.slots) for matrix in matrices]
    return [slice(stop - count, stop) for count, stop in zip(counts, itertools.accumulate(counts), strict=True)]


def spans_of(units: Iterable[Matrix | Slot]) -> list[tuple[int, int]]:
    """Where these begin and end in the bucket."""
    return [(x.start, x.stop) if isinstance(x, Matrix) else (x.offset, x.stop) for x in units]


def complement(spans: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """The gaps between `spans` (sorted, disjoint) in 0..numel."""
    gaps, at = [], 0
    for begin, end in [*spans, (numel, numel)]:
        if begin > at:
            gaps.append((at, begin))
        at = end
    return gaps
