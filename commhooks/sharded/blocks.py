"""Encode pieces of a row in blocks, with the kernels of the quantised hooks."""

import itertools
from collections.abc import Sequence

import torch

from commhooks.comm.packing import concat_into, scatter_into
from commhooks.compressors.native.tables import PieceTable, address
from commhooks.compressors.quantized.kernels import add_dequantised, dequantise, quantise
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.gradients.precision import compute_dtype
from commhooks.sharded.layout import Piece
from commhooks.sharded.memory import Memory
from commhooks.sharded.parts import Weigh, aligned


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

    def scales(self, section: torch.Tensor) -> torch.Tensor:
        return section[: sum(self.blocks) * self.real.itemsize].view(self.real)

    def codes(self, section: torch.Tensor) -> torch.Tensor:
        return section[self.codes_at :].view(-1, self.code.block_bytes)


class TorchBlocks(Blocks):
    """Implements `Part` with torch, on any device, in a copy of the pieces that is padded to whole
    blocks. The host waits for no device.
    """

    def __init__(
        self, pieces: Sequence[Piece], code: BlockCode, dtype: torch.dtype, scratch: Memory
    ) -> None:
        super().__init__(pieces, code, dtype, scratch)
        self._numel = sum(self.blocks) * code.block_size
        scratch.reserve(self._numel * self.real.itemsize)
        self._paddings = [
            blocks * code.block_size - piece.numel
            for blocks, piece in zip(self.blocks, pieces, strict=True)
        ]

    def encode(self, row: torch.Tensor, section: torch.Tensor) -> None:
        with self.scratch.lent(self._numel, self.real) as numbers:
            blocks = self._load(row, numbers)
            codes, scales = self.codes(section), self.scales(section)
            quantise(self.code, blocks, codes, scales, self.largest_scale)

    def decode(self, section: torch.Tensor, row: torch.Tensor) -> None:
        with self.scratch.lent(self._numel, self.real) as numbers:
            blocks = numbers.view(-1, self.code.block_size)
            dequantise(self.code, self.codes(section), self.scales(section), blocks)
            scatter_into(numbers, self._with_paddings(row))

    def add(self, row: torch.Tensor, sections: Sequence[torch.Tensor], weigh: Weigh) -> None:
        with self.scratch.lent(self._numel, self.real) as numbers:
            blocks = weigh(self._load(row, numbers))
            for section in sections:
                scales = weigh(self.scales(section))
                add_dequantised(self.code, self.codes(section), scales, blocks)
            scatter_into(numbers, self._with_paddings(row))

    def _load(self, row: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        concat_into(self._with_paddings(row), numbers)
        return numbers.view(-1, self.code.block_size)

    def _with_paddings(self, row: torch.Tensor) -> list[torch.Tensor]:
        zeros = row.new_zeros(self.code.block_size)
        parts = []
        for piece, missing in zip(self.pieces, self._paddings, strict=True):
            parts += [piece.of(row), zeros[:missing]]
        return [part for part in parts if len(part)]


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

    def encode(self, row: torch.Tensor, section: torch.Tensor) -> None:
        with self.scratch.lent(self._numel, self.real) as scratch:
            self._use(self._load(row, scratch))
            self._point("codes", "scales", section)
            # factor 1, ranks 1, rank 0, stride 0: quantise only
            self._table.run("quantise", self.code.bits, self.largest_scale, 1.0, 1, 0, 0)

    def decode(self, section: torch.Tensor, row: torch.Tensor) -> None:
        with self.scratch.lent(self._numel, self.real) as scratch:
            self._use(scratch if self._copies else row)
            self._point("arrived_codes", "arrived_scales", section)
            self._table.run("dequantise", self.code.bits)
            self._store(scratch, row)

    def add(self, row: torch.Tensor, sections: Sequence[torch.Tensor], weigh: Weigh) -> None:
        with self.scratch.lent(self._numel, self.real) as scratch:
            self._use(self._load(row, scratch))
            for numbers in [scratch] if self._copies else [piece.of(row) for piece in self.pieces]:
                weigh(numbers)
            for section in sections:
                weigh(self.scales(section))
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
