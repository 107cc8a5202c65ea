"""Encode pieces of a row in blocks, with the kernels of the quantised hooks."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from commhooks.comm.packing import concat_into, scatter_into
from commhooks.compressors.native.tables import PieceTable, address
from commhooks.compressors.quantized.kernels import dequantise, quantise
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.gradients.precision import compute_dtype
from commhooks.sharded.layout import Piece
from commhooks.sharded.memory import Memory
from commhooks.sharded.parts import Part, Weigh, aligned, together


class Blocks:
    """Describes the pieces of a row in blocks, and their section: the scales of all blocks, then
    their codes, in whole blocks. Base of the kernels.
    """

    def __init__(
        self, pieces: Sequence[Piece], code: BlockCode, dtype: torch.dtype, scratch: Memory
    ) -> None:
        self.pieces = pieces
        self.code = code
        self.dtype = dtype
        self.scratch = scratch
        self.real = compute_dtype(dtype)
        self.largest_scale = code.largest_scale(torch.finfo(dtype).max, self.real)
        self.blocks = [code.blocks_of(piece.numel) for piece in pieces]
        self.codes_at = aligned(sum(self.blocks) * self.real.itemsize)
        self.nbytes = self.codes_at + sum(self.blocks) * code.block_bytes

    def scales(self, sections: torch.Tensor) -> torch.Tensor:
        return sections[:, : sum(self.blocks) * self.real.itemsize].view(self.real)

    def codes(self, sections: torch.Tensor) -> torch.Tensor:
        return sections[:, self.codes_at :].unflatten(1, (-1, self.code.block_bytes))


NewBlocks = Callable[[Sequence[Piece], BlockCode, torch.dtype, Memory], Part]
"""Makes a kernel of pieces, a code, the dtype of the rows, and memory for copies of them."""


class TorchBlocks(Blocks):
    """Implements `Part` with torch, on any device, in copies of the pieces that are padded to whole
    blocks. The host waits for no device. `rows`: how many it computes at a time, at most.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        code: BlockCode,
        dtype: torch.dtype,
        scratch: Memory,
        *,
        rows: int = 1,
    ) -> None:
        super().__init__(pieces, code, dtype, scratch)
        self._numel = sum(self.blocks) * code.block_size
        row_bytes = self._numel * self.real.itemsize
        self._together = together(rows, row_bytes, scratch.device)
        scratch.reserve((1 + self._together) * row_bytes)  # `add` has its sum in the first one
        self._paddings = [
            blocks * code.block_size - piece.numel
            for blocks, piece in zip(self.blocks, pieces, strict=True)
        ]

    def encode(self, rows: torch.Tensor, sections: torch.Tensor) -> None:
        with self._scratch() as scratch:
            for some in self._turns(len(rows)):
                blocks = self._load(rows[some], scratch)
                codes, scales = self.codes(sections[some]), self.scales(sections[some])
                quantise(self.code, blocks, codes, scales, self.largest_scale)

    def decode(self, sections: torch.Tensor, rows: torch.Tensor) -> None:
        with self._scratch() as scratch:
            for some in self._turns(len(rows)):
                blocks = self._decoded(sections[some], scratch)
                scatter_into(blocks.flatten(1), self._with_paddings(rows[some]))

    def add(self, row: torch.Tensor, sections: torch.Tensor, own: int, weigh: Weigh) -> None:
        weigh(self.scales(sections))
        with self._scratch() as scratch:
            total = weigh(self._load(row.unsqueeze(0), scratch))
            for some in self._turns(len(sections)):
                summands = self._decoded(sections[some], scratch[1:])
                for sender, summand in enumerate(summands, some.start):
                    if sender != own:
                        total[0].add_(summand)
            scatter_into(total.flatten(1), self._with_paddings(row.unsqueeze(0)))

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[torch.Tensor]:
        rows = 1 + self._together
        with self.scratch.lent(rows * self._numel, self.real) as numbers:
            yield numbers.view(rows, -1, self.code.block_size)

    def _turns(self, rows: int) -> Iterator[slice]:
        starts = range(0, rows, self._together)
        return (slice(first, min(rows, first + self._together)) for first in starts)

    def _load(self, rows: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        blocks = scratch[: len(rows)]
        concat_into(self._with_paddings(rows), blocks.flatten(1))
        return blocks

    def _decoded(self, sections: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        blocks = scratch[: len(sections)]
        return dequantise(self.code, self.codes(sections), self.scales(sections), blocks)

    def _with_paddings(self, rows: torch.Tensor) -> list[torch.Tensor]:
        zeros = rows.new_zeros(len(rows), self.code.block_size)
        parts = []
        for piece, missing in zip(self.pieces, self._paddings, strict=True):
            parts += [piece.of(rows), zeros[:, :missing]]
        return [part for part in parts if part.shape[1]]


class NativeBlocks(Blocks):
    """Implements `Part` with the C kernel, on the CPU: in the row itself, or in a copy of the
    pieces if the row has 16 bits.
    """

    def __init__(
        self, pieces: Sequence[Piece], code: BlockCode, dtype: torch.dtype, scratch: Memory
    ) -> None:
        super().__init__(pieces, code, dtype, scratch)
        self._copies = dtype != self.real
        self._numel = sum(piece.numel for piece in pieces) if self._copies else 0
        scratch.reserve(self._numel * self.real.itemsize)
        starts = [piece.start for piece in pieces]
        if self._copies:
            starts = _starts([piece.numel for piece in pieces])
        self._end = starts[-1] + pieces[-1].numel
        # per piece, in bytes: where its numbers, codes and scales begin
        first_blocks = torch.tensor(_starts(self.blocks))
        self._numbers_at = torch.tensor(starts) * self.real.itemsize
        self._codes_at = first_blocks * code.block_bytes
        self._scales_at = first_blocks * self.real.itemsize
        self._table = PieceTable([[piece.numel, code.block_size] for piece in pieces], self.real)

    def encode(self, rows: torch.Tensor, sections: torch.Tensor) -> None:
        with self.scratch.lent(self._numel, self.real) as scratch:
            for row, section in zip(rows, sections, strict=True):
                self._use(self._load(row, scratch))
                self._point("codes", "scales", section)
                # factor 1, ranks 1, rank 0, stride 0: quantise only
                self._table.run("quantise", self.code.bits, self.largest_scale, 1.0, 1, 0, 0)

    def decode(self, sections: torch.Tensor, rows: torch.Tensor) -> None:
        with self.scratch.lent(self._numel, self.real) as scratch:
            for row, section in zip(rows, sections, strict=True):
                self._use(scratch if self._copies else row)
                self._point("arrived_codes", "arrived_scales", section)
                self._table.run("dequantise", self.code.bits)
                self._store(scratch, row)

    def add(self, row: torch.Tensor, sections: torch.Tensor, own: int, weigh: Weigh) -> None:
        weigh(self.scales(sections))
        with self.scratch.lent(self._numel, self.real) as scratch:
            self._use(self._load(row, scratch))
            for numbers in [scratch] if self._copies else [piece.of(row) for piece in self.pieces]:
                weigh(numbers)
            for sender, section in enumerate(sections):
                if sender != own:
                    self._point("arrived_codes", "arrived_scales", section)
                    self._table.run("add_dequantised", self.code.bits)
            self._store(scratch, row)

    def _load(self, row: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        if not self._copies:
            return row
        concat_into([piece.of(row) for piece in self.pieces], scratch)
        return scratch

    def _store(self, scratch: torch.Tensor, row: torch.Tensor) -> None:
        if self._copies:
            scatter_into(scratch, [piece.of(row) for piece in self.pieces])

    def _use(self, numbers: torch.Tensor) -> None:
        start = address(numbers, self.real, self._end)
        torch.add(self._numbers_at, start, out=self._table.column("bucket"))

    def _point(self, codes: str, scales: str, section: torch.Tensor) -> None:
        start = address(section, torch.uint8, self.nbytes)
        torch.add(self._codes_at, start + self.codes_at, out=self._table.column(codes))
        torch.add(self._scales_at, start, out=self._table.column(scales))


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))[:-1]
