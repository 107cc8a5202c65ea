"""The quantised mean with the native kernel, on the CPU, in the buffer itself."""

import itertools
from collections.abc import Sequence

import torch

from commhooks.comm.wire import divide, join
from commhooks.compressors.native.tables import address
from commhooks.compressors.quantized import native_blocks
from commhooks.compressors.quantized.mean import Good, Residuals
from commhooks.compressors.quantized.messages import Averaged, ShareMessages
from commhooks.compressors.quantized.native_blocks import PieceTable
from commhooks.gradients.layout import Slot
from commhooks.gradients.loss_scale import LossScale, is_one


class NativeKernel:
    """See `BlockKernel`. Delta is never a tensor: the kernel forms it block by block where the gradient is, in the
    buffer or in a copy if the buffer has 16 bits, and leaves there what is lost.

    Args:
        slots: the tensors, in the order of the blocks.
        dtype: of the buffer.
        error_feedback: keep residuals.
    """

    def __init__(
        self, messages: ShareMessages, rank: int, slots: Sequence[Slot], dtype: torch.dtype, *, error_feedback: bool
    ) -> None:
        self.messages, self.rank = messages, rank
        self._slots, self._error_feedback = slots, error_feedback
        native, self._bits = native_blocks.load(messages.dtype), messages.code.bits
        self._quantise, self._dequantise = native.commhooks_quantise, native.commhooks_dequantise
        self._copy: torch.Tensor | None = None
        self._starts = [slot.offset for slot in slots]
        if dtype != messages.dtype:
            self._copy = torch.empty(sum(slot.numel for slot in slots), dtype=messages.dtype)
            *self._starts, _ = itertools.accumulate((slot.numel for slot in slots), initial=0)
        self._end = max(start + slot.numel for start, slot in zip(self._starts, slots, strict=True))
        self._numbers = torch.empty(0)
        """The buffer or the copy: gradients, then what is lost of delta, then the averages."""
        self._read: list[torch.Tensor | None] = []
        self._residuals_at: list[int] = []
        self._factor = 1.0
        self._make_table()

    def _make_table(self) -> None:
        """A row per piece, those that this rank averages first. Offsets are in bytes."""
        messages, code, size = self.messages, self.messages.code, self.messages.dtype.itemsize
        sizes, offsets = [], []
        pieces = sorted(messages.shares.pieces, key=lambda each: each.owner != self.rank)
        for each in pieces:
            begin = each.first * code.block_size
            sizes.append([min(each.blocks * code.block_size, self._slots[each.tensor].numel - begin), code.block_size])
            codes_at = messages.codes_at + each.place * code.block_bytes
            scales_at = messages.scales_at + each.place * size
            in_numbers = size * (self._starts[each.tensor] + begin)
            offsets.append((each.tensor, in_numbers, size * begin, codes_at, scales_at, each.owner * messages.size))
        columns = torch.tensor(offsets).unbind(1)
        self._tensor, self._in_numbers, self._in_tensor, self._codes_at, self._scales_at, self._of_owner = columns
        self._table = table = PieceTable(sizes, messages.dtype)
        self._in_bucket, self._residual = table.column("bucket"), table.column("residual")
        self._arrived_codes, self._arrived_scales = table.column("arrived_codes"), table.column("arrived_scales")
        own = sum(each.owner == self.rank for each in pieces)
        self._own, self._others, self._all = slice(own), slice(own, None), slice(None)
        # Codes and scales are written where they are sent from.
        written = self._of_owner + address(messages.sent, torch.uint8, messages.sent.numel())
        written[self._own] = address(messages.mean, torch.uint8, messages.size)
        torch.add(written, self._codes_at, out=table.column("codes"))
        torch.add(written, self._scales_at, out=table.column("scales"))

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        self._numbers = flat
        if self._copy is not None:
            self._numbers = self._copy
            join([slot.of(flat) for slot in self._slots], self._copy)
        start = address(self._numbers, self._table.dtype, self._end)
        torch.add(self._in_numbers, start, out=self._in_bucket)
        self._read = [residuals.get(slot.name) if self._error_feedback else None for slot in self._slots]
        self._point_to_residuals(self._read)
        self._factor = float(factor)

    def quantise(self) -> None:
        self._table.run(self._quantise, self._bits, self.messages.most, self._factor, 1, 0, 0, rows=self._others)

    def average(self, arrived: torch.Tensor) -> None:
        messages = self.messages
        self._point_to_arrived(self._own, address(arrived, torch.uint8, messages.sent.numel()))
        mean_of = messages.world_size, self.rank, messages.size
        self._table.run(self._quantise, self._bits, messages.most, self._factor, *mean_of, rows=self._own)

    def store(
        self, averaged: Averaged, flat: torch.Tensor, residuals: Residuals, factor: LossScale, good: Good
    ) -> None:
        used = (averaged.flags > 0).tolist()
        kept: list[torch.Tensor | None] = [None] * len(used)
        if self._error_feedback and bool(good):
            kept = [self._kept(*each, residuals, factor) for each in zip(self._slots, used, strict=True)]
        self._point_to_residuals(kept)
        means = address(averaged.means, torch.uint8, self.messages.sent.numel())
        self._point_to_arrived(self._all, self._of_owner + means)
        self._table.run(self._dequantise, self._bits)
        for slot, start, has in zip(self._slots, self._starts, used, strict=True):
            if not has:
                self._numbers[start : start + slot.numel].zero_()
        if self._copy is not None:
            divide(self._copy, [slot.of(flat) for slot in self._slots])

    def _kept(self, slot: Slot, used: bool, residuals: Residuals, factor: LossScale) -> torch.Tensor | None:
        """The memory for a residual; None if the old one stays."""
        if slot.name not in residuals:
            residuals[slot.name] = torch.zeros(slot.numel, dtype=self._table.dtype)
        elif not used and not is_one(factor):
            residuals[slot.name].mul_(factor)
        return residuals[slot.name] if used else None

    def _point_to_residuals(self, residuals: Sequence[torch.Tensor | None]) -> None:
        starts = [
            0 if each is None else address(each, self._table.dtype, slot.numel)
            for slot, each in zip(self._slots, residuals, strict=True)
        ]
        if starts != self._residuals_at:  # they stay where they are, unless a parameter has no gradient
            self._residuals_at = starts
            of_pieces = torch.tensor(starts).index_select(0, self._tensor)
            self._residual.copy_(torch.where(of_pieces == 0, 0, of_pieces + self._in_tensor))

    def _point_to_arrived(self, rows: slice, start: int | torch.Tensor) -> None:
        """Codes and scales are read from the messages at `start`."""
        self._arrived_codes[rows] = self._codes_at[rows] + start
        self._arrived_scales[rows] = self._scales_at[rows] + start
