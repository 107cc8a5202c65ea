"""Parts of a row that are encoded alike, and their section of a message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from commhooks.comm.packing import concat_into, scatter_into
from commhooks.gradients import precision
from commhooks.gradients.precision import compute_dtype
from commhooks.sharded.layout import Piece

_ALIGNMENT = 8
"""Sections begin at multiples of this many bytes, the size of the largest element."""
_AT_ONCE = 64 * 2**20
"""Bytes of numbers that are computed at once on an accelerator."""


@dataclass(frozen=True)
class Weigh:
    """Divides a tensor in place by `divisor` and multiplies it by `factor`, as the reduction
    demands, and returns it.
    """

    divisor: int = 1
    factor: float = 1.0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.divisor != 1:
            # A tensor, because on CUDA torch multiplies by the reciprocal of a Python number.
            tensor.div_(tensor.new_full((), self.divisor))
        if self.factor != 1.0:
            tensor.mul_(self.factor)
        return tensor


def aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def together(rows: int, row_bytes: int, device: torch.device) -> int:
    """Return how many rows of `row_bytes` to process at once, so that small units take few
    operators on an accelerator: `rows`, or as many as `_AT_ONCE` bytes hold. On the CPU one, which
    is in the cache more often.
    """
    if precision.is_host_readable(device):
        return 1
    return max(1, min(rows, _AT_ONCE // max(1, row_bytes)))


class Part(Protocol):
    """Encodes some pieces of rows. `rows` are `n x numel`, `sections` uint8, `n x nbytes`."""

    nbytes: int

    def encode(self, rows: torch.Tensor, sections: torch.Tensor) -> None:
        """Write `sections`. The pieces may be overwritten."""

    def decode(self, sections: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the pieces."""

    def add(self, row: torch.Tensor, sections: torch.Tensor, own: int, weigh: Weigh) -> None:
        """Replace the pieces x of `row` by weigh(x) + weigh(sections[0]) + weigh(sections[1]) ...,
        without sections[own], computed in this order in float32, or in float64 if the row is. The
        sections may be overwritten.
        """


class PlainPart:
    """Sends the numbers of a row of `dtype` in `wire_dtype`."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        rows: int,
        device: torch.device,
    ) -> None:
        self._pieces = pieces
        self._real = compute_dtype(dtype)
        self._wire_dtype = wire_dtype
        numel = sum(piece.numel for piece in pieces)
        self.nbytes = numel * wire_dtype.itemsize
        self._together = together(rows, numel * self._real.itemsize, device)

    def encode(self, rows: torch.Tensor, sections: torch.Tensor) -> None:
        concat_into([piece.of(rows) for piece in self._pieces], sections.view(self._wire_dtype))

    def decode(self, sections: torch.Tensor, rows: torch.Tensor) -> None:
        numbers = sections.view(self._wire_dtype)
        scatter_into(numbers, [piece.of(rows) for piece in self._pieces])

    def add(self, row: torch.Tensor, sections: torch.Tensor, own: int, weigh: Weigh) -> None:
        pieces = [piece.of(row) for piece in self._pieces]
        total = weigh(torch.cat(pieces).to(self._real))
        for first in range(0, len(sections), self._together):
            some = sections[first : first + self._together]
            numbers = weigh(some.view(self._wire_dtype).to(self._real))
            for sender, summand in enumerate(numbers, first):
                if sender != own:
                    total += summand
        scatter_into(total, pieces)
