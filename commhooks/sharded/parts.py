"""Parts of a row that are encoded alike, and their section of a message."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from commhooks.comm.packing import concat_into, scatter_into
from commhooks.gradients.precision import compute_dtype
from commhooks.sharded.layout import Piece

_ALIGNMENT = 8
"""Sections begin at multiples of this many bytes, the size of the largest element."""

Weigh = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies or divides a tensor in place, as the reduction demands, and returns it."""


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Part(Protocol):
    """Encodes some pieces of rows. A section is a uint8 tensor of `nbytes`."""

    nbytes: int

    def encode(self, row: torch.Tensor, section: torch.Tensor) -> None:
        """Write `section`. The pieces may be overwritten."""

    def decode(self, section: torch.Tensor, row: torch.Tensor) -> None:
        """Write the pieces."""

    def add(self, row: torch.Tensor, sections: Sequence[torch.Tensor], weigh: Weigh) -> None:
        """Replace the pieces x of `row` by weigh(x) + weigh(sections[0]) + weigh(sections[1]) ...,
        computed in this order in float32, or in float64 if the row is. The sections may be
        overwritten.
        """


class PlainPart:
    """Sends the numbers of a row of `dtype` in `wire_dtype`."""

    def __init__(
        self, pieces: Sequence[Piece], dtype: torch.dtype, wire_dtype: torch.dtype
    ) -> None:
        self._pieces = pieces
        self._dtype = dtype
        self._wire_dtype = wire_dtype
        self.nbytes = sum(piece.numel for piece in pieces) * wire_dtype.itemsize

    def encode(self, row: torch.Tensor, section: torch.Tensor) -> None:
        concat_into([piece.of(row) for piece in self._pieces], section.view(self._wire_dtype))

    def decode(self, section: torch.Tensor, row: torch.Tensor) -> None:
        numbers = section.view(self._wire_dtype)
        scatter_into(numbers, [piece.of(row) for piece in self._pieces])

    def add(self, row: torch.Tensor, sections: Sequence[torch.Tensor], weigh: Weigh) -> None:
        pieces = [piece.of(row) for piece in self._pieces]
        real = compute_dtype(self._dtype)
        total = weigh(torch.cat(pieces).to(real))
        for section in sections:
            total += weigh(section.view(self._wire_dtype).to(real))
        scatter_into(total, pieces)
