"""Compute the quantised mean: with torch on any device, and with the C kernel on the CPU.

`triton_kernel.py` is for CUDA. All kernels perform the same operations in the same order, so their
bits are equal.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch

from commhooks.comm.packing import concat_into, put_flags, scatter_into
from commhooks.compressors.error_feedback import NamedViews
from commhooks.compressors.native import library
from commhooks.compressors.native.tables import ALL, PieceTable, address
from commhooks.compressors.quantized.mean import (
    Averaged,
    BlockCode,
    Good,
    Piece,
    Residuals,
    ShareMessages,
    sum_in_pairs,
)
from commhooks.gradients import precision
from commhooks.gradients.layout import Slot, bytes_of
from commhooks.gradients.loss_scale import LossScale, chosen, is_one

_PIECE = 2**20
"""Elements processed at once on the CPU, so that intermediate results stay in the cache."""


# ---- blocks and their codes, with torch ----------------------------------------------------------


def quantise(
    code: BlockCode,
    blocks: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    largest_scale: float,
) -> None:
    """Write `codes` and `scales`, and replace `blocks` by the error, blocks - codes * scales.

    `blocks` is `... x n x block_size`, `codes` `... x n x block_bytes`, `scales` `... x n`. Numbers
    beyond `code.levels * largest_scale` are clamped; the excess is part of the error.
    """
    scales.copy_(_scales(code, blocks, largest_scale))
    divisors = scales.masked_fill(scales == 0, 1).unsqueeze(-1)
    for at in _pieces(blocks):
        whole = torch.div(blocks[at], divisors[at]).round_().clamp_(-code.levels, code.levels)
        # Round the product as decoding does. Whether addcmul_ rounds it depends on the processor.
        blocks[at].sub_(whole * scales[at].unsqueeze(-1))
        if code.bits == 8:
            codes[at].view(torch.int8).copy_(whole)
        else:
            low, high = whole.unflatten(-1, (2, -1)).unbind(-2)
            codes[at].copy_(low.add_(high, alpha=16).add_(8 * 17))


def dequantise(
    code: BlockCode, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write codes * scales to `out` and return it.

    `out` is `... x n x block_size`, in the dtype of `scales`.
    """
    for at in _pieces(out):
        _unpack(code, codes[at], out[at]).mul_(scales[at].unsqueeze(-1))
    return out


def add_dequantised(
    code: BlockCode, codes: torch.Tensor, scales: torch.Tensor, total: torch.Tensor
) -> None:
    for at in _pieces(total):
        numbers = _unpack(code, codes[at], torch.empty_like(total[at]))
        total[at].add_(numbers.mul_(scales[at].unsqueeze(1)))


def _scales(code: BlockCode, blocks: torch.Tensor, largest_scale: float) -> torch.Tensor:
    top = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())
    # `top * 0` makes the divisor NaN where top is inf or NaN. The divisor is a tensor, because on
    # CUDA torch multiplies by the reciprocal of a Python number.
    top.div_((top * 0).add_(code.levels)).clamp_(max=largest_scale)  # NaN stays NaN
    # A denormal scale has few digits, and some devices treat it as zero: send such a block as
    # zeros.
    return top.masked_fill_(top < torch.finfo(blocks.dtype).tiny, 0)


def _unpack(code: BlockCode, codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if code.bits == 8:
        return out.copy_(codes.view(torch.int8))
    low, high = out.unflatten(-1, (2, -1)).unbind(-2)
    low.copy_(codes & 15)
    high.copy_(codes >> 4)
    return out.sub_(8)


def _pieces(blocks: torch.Tensor) -> Iterator[slice]:
    rows = len(blocks)
    step = rows
    if precision.is_host_readable(blocks.device):
        step = _PIECE // blocks.shape[-1]
    step = max(1, step)
    return (slice(at, at + step) for at in range(0, rows, step))


class BlockBuffers:
    """Holds delta and the residuals for `TorchKernel` and `TritonKernel`, for any number of ranks.

    Attributes:
        delta: `blocks + 1` rows, of which the last is zero. Padding at the end of a slot's last
            block is zero, too.
        residuals: the residuals of `slots`, in blocks; None without error feedback.
        slot_of_block: the index of each block's slot.
    """

    def __init__(
        self,
        code: BlockCode,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        device: torch.device,
        *,
        error_feedback: bool,
    ) -> None:
        blocks = [code.blocks_of(slot.numel) for slot in slots]
        rows = list(itertools.accumulate(blocks, initial=0))
        self.slots = slots
        self.delta = torch.zeros(rows[-1] + 1, code.block_size, dtype=dtype, device=device)
        self.residuals: NamedViews | None = None
        if error_feedback:
            entries = [
                (slot.name, row * code.block_size, (slot.numel,))
                for slot, row in zip(slots, rows, strict=False)
            ]
            whole = torch.zeros(rows[-1] * code.block_size, dtype=dtype, device=device)
            self.residuals = NamedViews(entries, whole)
        slot_of_block = torch.arange(len(slots)).repeat_interleave(torch.tensor(blocks))
        self.slot_of_block = slot_of_block.to(device)
        self._first_and_end = torch.tensor([rows[:-1], rows[1:]]).view(-1).to(device)
        self._paddings = [
            count * code.block_size - slot.numel for count, slot in zip(blocks, slots, strict=True)
        ]
        self._zeros = torch.zeros(code.block_size, dtype=dtype, device=device)
        self._unused = torch.empty(sum(self._paddings), dtype=dtype, device=device)

    @property
    def of_slots(self) -> torch.Tensor:
        return self.delta[:-1]

    def put_gradients(self, flat: torch.Tensor) -> None:
        zeros = self._zeros.to(flat.dtype)
        paddings = [zeros[:numel] for numel in self._paddings]
        concat_into(self._with(paddings, flat), self.of_slots.view(-1))

    def write_gradients(self, flat: torch.Tensor) -> None:
        paddings = self._unused.to(flat.dtype).split(self._paddings)
        scatter_into(self.of_slots.view(-1), self._with(paddings, flat))

    def put_flags(self, flags: torch.Tensor) -> None:
        """Write a flag per slot: 1 if its numbers in `delta` are not all zero, else 0."""
        is_nonzero = torch.linalg.vector_norm(self.of_slots, float("inf"), dim=1) != 0
        # A slot is nonzero if the running count of nonzero blocks grows from its first block to its
        # end.
        counts = torch.cat([is_nonzero.new_zeros(1), is_nonzero]).cumsum(0)
        first, end = counts.index_select(0, self._first_and_end).view(2, -1)
        flags.copy_(first != end)

    def _with(self, paddings: Sequence[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = []
        for slot, padding in zip(self.slots, paddings, strict=True):
            pieces += [slot.of(flat), padding]
        return [piece for piece in pieces if len(piece)]


class TorchKernel:
    """Implements `BlockKernel` with torch, on any device.

    On an accelerator the host never waits for the device. The number of operators does not depend
    on the number of tensors, and grows by two when the number of ranks doubles.
    """

    def __init__(self, buffers: BlockBuffers, messages: ShareMessages, rank: int) -> None:
        self.buffers = buffers
        self.messages = messages
        self.rank = rank
        rows = len(buffers.delta)
        device = messages.sent.device
        # codes and scales of `delta`
        block_bytes = messages.code.block_bytes
        self.codes = torch.zeros(rows, block_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(rows, dtype=messages.dtype, device=device)
        self._share: torch.Tensor | None = None
        """Delta of this rank's share, divided by the world size."""
        self._ranks = torch.full((), messages.world_size, dtype=messages.dtype, device=device)

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        buffers = self.buffers
        flags = self.messages.flags
        buffers.put_gradients(flat)
        if precision.is_host_readable(flat.device):
            put_flags([slot.of(flat) for slot in buffers.slots], flags)
        else:
            buffers.put_flags(flags)
        if buffers.residuals is not None:
            before = buffers.residuals.gather(residuals)
            buffers.of_slots.view(-1).add_(before if is_one(factor) else before * factor)

    def quantise(self) -> None:
        messages = self.messages
        shares = messages.shares
        # This rank averages its share without rounding it. Quantising all blocks is simpler;
        # `average` overwrites the rounding errors of the share.
        share = self.buffers.delta.index_select(0, shares.blocks[self.rank])
        self._share = share.div_(self._ranks)
        blocks = self.buffers.of_slots
        quantise(messages.code, blocks, self.codes[:-1], self.scales[:-1], messages.most)
        sent = messages.in_sent
        order = shares.blocks.view(-1)
        sent.scales.copy_(self.scales.index_select(0, order).view_as(sent.scales))
        sent.codes.copy_(self.codes.index_select(0, order).view_as(sent.codes))

    def average(self, arrived: torch.Tensor) -> None:
        messages = self.messages
        code = messages.code
        world_size = messages.world_size
        total = self._share
        self._share = None
        assert total is not None
        parts = messages.sections(arrived)
        codes = parts.codes.unflatten(1, (-1, code.block_bytes))
        scales = parts.scales / self._ranks
        if precision.is_host_readable(arrived.device):
            for rank in range(world_size):
                if rank != self.rank:
                    add_dequantised(code, codes[rank], scales[rank], total)
        else:
            deltas = dequantise(code, codes, scales, total.new_empty(world_size, *total.shape))
            deltas[self.rank].copy_(total)
            total = sum_in_pairs(deltas)
        mean = messages.in_mean
        quantise(code, total, mean.codes.view(-1, code.block_bytes), mean.scales, messages.most)
        # `total` is now the rounding error of the mean. The owner alone corrects it, so multiply by
        # the world size.
        blocks = messages.shares.blocks[self.rank, : messages.shares.counts[self.rank]]
        self.buffers.delta.index_copy_(0, blocks, total[: len(blocks)].mul_(world_size))

    def store(
        self,
        averaged: Averaged,
        flat: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: Good,
    ) -> None:
        has_gradient = averaged.flags > 0
        used = None
        if not (precision.is_host_readable(flat.device) and bool(has_gradient.all())):
            used = has_gradient.index_select(0, self.buffers.slot_of_block).unsqueeze(1)
        self._keep_lost(residuals, factor, good, used)
        code = self.messages.code
        places = self.messages.shares.places
        codes = averaged.sections.codes.reshape(-1, code.block_bytes).index_select(0, places)
        scales = averaged.sections.scales.reshape(-1).index_select(0, places)
        mean = dequantise(code, codes, scales, self.buffers.of_slots)
        if used is not None:
            mean.masked_fill_(~used, 0)
        self.buffers.write_gradients(flat)

    def _keep_lost(
        self, residuals: Residuals, factor: LossScale, good: Good, used: torch.Tensor | None
    ) -> None:
        """Store delta, now the rounding errors, as the residuals.

        `used` masks the blocks whose tensor has a flag (bool, `n x 1`); None if the host has read
        that all have one.
        """
        if good is False or self.buffers.residuals is None:
            return
        lost = self.buffers.of_slots
        before = self.buffers.residuals.bind(residuals).view_as(lost)
        if good is True and used is None:
            before.copy_(lost)
            return
        # Residuals that are kept are rescaled to the new loss scale only if the step is committed.
        factor = chosen(good, factor, 1.0)
        if not is_one(factor):
            before.mul_(factor)
        keep = torch.as_tensor(good, device=lost.device) if used is None else used & good
        torch.where(keep, lost, before, out=before)


# ---- the C kernel, native/quantized.c ------------------------------------------------------------


class NativeKernel:
    """Implements `BlockKernel` with the C kernel, on the CPU.

    It computes delta in the buffer, or in a copy if the buffer has 16 bits, block by block, and
    leaves the rounding error there.
    """

    def __init__(
        self,
        messages: ShareMessages,
        rank: int,
        slots: Sequence[Slot],
        dtype: torch.dtype,
        *,
        error_feedback: bool,
    ) -> None:
        self.messages = messages
        self.rank = rank
        self._slots = slots
        self._error_feedback = error_feedback
        self._bits = messages.code.bits
        self._copy: torch.Tensor | None = None
        self._starts = [slot.offset for slot in slots]
        if dtype != messages.dtype:
            self._copy = torch.empty(sum(slot.numel for slot in slots), dtype=messages.dtype)
            *self._starts, _ = itertools.accumulate((slot.numel for slot in slots), initial=0)
        self._end = max(start + slot.numel for start, slot in zip(self._starts, slots, strict=True))
        self._numbers = torch.empty(0)
        """The buffer or its copy: first gradients, then rounding errors, then averages."""
        self._read: list[torch.Tensor | None] = []
        self._residuals_at: list[int] = []
        self._factor = 1.0
        self._make_table()

    def _make_table(self) -> None:
        """Make a table with a row per piece, with the pieces of this rank's share first."""
        messages = self.messages
        block_size = messages.code.block_size
        pieces = sorted(messages.shares.pieces, key=lambda piece: piece.owner != self.rank)
        sizes = []
        for piece in pieces:
            rest = self._slots[piece.tensor].numel - piece.first * block_size
            sizes.append([min(piece.blocks * block_size, rest), block_size])
        self._set_offsets(pieces)
        self._table = table = PieceTable(sizes, messages.dtype)
        self._in_bucket = table.column("bucket")
        self._residual = table.column("residual")
        self._arrived_codes = table.column("arrived_codes")
        self._arrived_scales = table.column("arrived_scales")
        mine = sum(piece.owner == self.rank for piece in pieces)
        self._mine = slice(mine)
        self._others = slice(mine, None)
        # The kernel writes codes and scales directly into the messages.
        written = self._of_owner + address(messages.sent, torch.uint8, messages.sent.numel())
        written[self._mine] = address(messages.mean, torch.uint8, messages.size)
        torch.add(written, self._codes_at, out=table.column("codes"))
        torch.add(written, self._scales_at, out=table.column("scales"))

    def _set_offsets(self, pieces: Sequence[Piece]) -> None:
        """Compute where each piece is, in bytes: in the tensors and in the messages."""
        messages = self.messages
        code = messages.code
        itemsize = messages.dtype.itemsize
        self._tensor = torch.tensor([piece.tensor for piece in pieces])
        first = torch.tensor([piece.first for piece in pieces])
        place = torch.tensor([piece.place for piece in pieces])
        owner = torch.tensor([piece.owner for piece in pieces])
        self._in_tensor = itemsize * code.block_size * first
        start_of_tensor = itemsize * torch.tensor(self._starts)
        self._in_numbers = start_of_tensor.index_select(0, self._tensor) + self._in_tensor
        self._codes_at = messages.codes_at + place * code.block_bytes
        self._scales_at = messages.scales_at + place * itemsize
        self._of_owner = owner * messages.size

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        put_flags([slot.of(flat) for slot in self._slots], self.messages.flags)
        self._numbers = flat
        if self._copy is not None:
            self._numbers = self._copy
            concat_into([slot.of(flat) for slot in self._slots], self._copy)
        start = address(self._numbers, self._table.dtype, self._end)
        torch.add(self._in_numbers, start, out=self._in_bucket)
        self._read = [
            residuals.get(slot.name) if self._error_feedback else None for slot in self._slots
        ]
        self._point_to_residuals(self._read)
        self._factor = float(factor)

    def quantise(self) -> None:
        # ranks=1, rank=0, stride=0: quantise only. With other values the kernel averages the
        # arrived shares first.
        self._table.run(
            "quantise", self._bits, self.messages.most, self._factor, 1, 0, 0, rows=self._others
        )

    def average(self, arrived: torch.Tensor) -> None:
        messages = self.messages
        self._point_to_arrived(self._mine, address(arrived, torch.uint8, messages.sent.numel()))
        mean_of = (messages.world_size, self.rank, messages.size)
        self._table.run(
            "quantise", self._bits, messages.most, self._factor, *mean_of, rows=self._mine
        )

    def store(
        self,
        averaged: Averaged,
        flat: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: Good,
    ) -> None:
        used = (averaged.flags > 0).tolist()
        kept: list[torch.Tensor | None] = [None] * len(used)
        if self._error_feedback and bool(good):
            kept = [
                self._kept(slot, is_used, residuals, factor)
                for slot, is_used in zip(self._slots, used, strict=True)
            ]
        self._point_to_residuals(kept)
        means = address(averaged.means, torch.uint8, self.messages.sent.numel())
        self._point_to_arrived(ALL, self._of_owner + means)
        self._table.run("dequantise", self._bits)
        for slot, start, is_used in zip(self._slots, self._starts, used, strict=True):
            if not is_used:
                self._numbers[start : start + slot.numel].zero_()
        if self._copy is not None:
            scatter_into(self._copy, [slot.of(flat) for slot in self._slots])

    def _kept(
        self, slot: Slot, used: bool, residuals: Residuals, factor: LossScale
    ) -> torch.Tensor | None:
        if slot.name not in residuals:
            residuals[slot.name] = torch.zeros(slot.numel, dtype=self._table.dtype)
        elif not used and not is_one(factor):
            residuals[slot.name].mul_(factor)
        return residuals[slot.name] if used else None

    def _point_to_residuals(self, residuals: Sequence[torch.Tensor | None]) -> None:
        starts = [
            0 if residual is None else address(residual, self._table.dtype, slot.numel)
            for slot, residual in zip(self._slots, residuals, strict=True)
        ]
        # they rarely move: when a parameter has no gradient, or after a load
        if starts != self._residuals_at:
            self._residuals_at = starts
            of_pieces = torch.tensor(starts).index_select(0, self._tensor)
            self._residual.copy_(torch.where(of_pieces == 0, 0, of_pieces + self._in_tensor))

    def _point_to_arrived(self, rows: slice, start: int | torch.Tensor) -> None:
        self._arrived_codes[rows] = self._codes_at[rows] + start
        self._arrived_scales[rows] = self._scales_at[rows] + start


def results_of(dtype: torch.dtype) -> bytes:
    """Return what the C kernel computes from fixed numbers, for `library.build`.

    All builds should agree, unless a compiler contracts multiplications and additions despite its
    flags.
    """
    results = []
    numel = 1003
    for code in (BlockCode(8, 64), BlockCode(4, 48)):
        blocks = code.blocks_of(numel)
        bucket, residual = (library.fixed_numbers(numel, start, dtype) for start in (1, 2))
        codes = torch.zeros(2, blocks * code.block_bytes, dtype=torch.uint8)
        scales = torch.zeros(2, blocks, dtype=dtype)
        tensors = [bucket, residual, codes[0], scales[0], codes, scales]
        most = code.largest_scale(torch.finfo(dtype).max, dtype)
        for rank in (0, 1):
            tensors[2:4] = [codes[rank], scales[rank]]
            places = [address(tensor, tensor.dtype, tensor.numel()) for tensor in tensors]
            table = PieceTable([[numel, code.block_size, *places]], dtype)
            table.run("quantise", code.bits, most, 0.7 + rank, 1, 0, 0)
        table.run("quantise", code.bits, most, 0.7, 2, 1, 0)
        table.run("dequantise", code.bits)
        results += [bucket, residual, codes, scales]
    return b"".join(map(bytes_of, results))
