"""Encode pieces of rows in blocks with Triton on CUDA devices: a kernel for each method of `Part`.

They read and write the rows themselves, with the bits of `TorchBlocks`. Before a device is used,
`build` compares them on small rows.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from commhooks.compressors.quantized.mean import BlockCode
from commhooks.compressors.quantized.triton_kernel import (
    TILE,
    bits_of,
    checked_build,
    decoded,
    divided,
    hard_numbers,
    integers_of,
    launch,
    put_codes,
    scales_of,
)
from commhooks.sharded.blocks import Blocks, NewBlocks, TorchBlocks
from commhooks.sharded.layout import Piece
from commhooks.sharded.memory import Memory
from commhooks.sharded.parts import Weigh

# ---- on the device -------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["blocks", "row_stride", "codes_stride", "scales_stride"])
def _encode(  # type: ignore[no-untyped-def]
    rows,
    codes,
    scales,
    first,
    count,
    blocks,
    row_stride,
    codes_stride,
    scales_stride,
    LEVELS: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, n) encodes ROWS blocks of row n. Beyond the end of a piece a block has zeros."""
    real: tl.constexpr = scales.dtype.element_ty
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1).to(tl.int64)
    there = block < blocks
    j = tl.arange(0, PADDED)[None, None, :]
    inside = there[:, None, None] & (j < tl.load(count + block, there, 0)[:, None, None])
    start = rows + row * row_stride + tl.load(first + block, there, 0)[:, None, None]
    x = tl.load(start + j, inside, 0.0).to(real)
    scale = scales_of(x, real, LEVELS, MOST, TINY, ROWS)
    whole = integers_of(x, scale[:, None, None], LEVELS)
    put_codes(codes, whole, row * codes_stride + block * WIDTH, there, 8, WIDTH)
    tl.store(scales + row * scales_stride + block, scale, there)


@triton.jit(do_not_specialize=["blocks", "row_stride", "codes_stride", "scales_stride"])
def _decode(  # type: ignore[no-untyped-def]
    rows,
    codes,
    scales,
    first,
    count,
    blocks,
    row_stride,
    codes_stride,
    scales_stride,
    WIDTH: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    real: tl.constexpr = scales.dtype.element_ty
    element = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    row = tl.program_id(1).to(tl.int64)
    block = element // WIDTH
    j = element % WIDTH
    there = block < blocks
    inside = there & (j < tl.load(count + block, there, 0))
    code = tl.load(codes + row * codes_stride + element, inside, 0)
    scale = tl.load(scales + row * scales_stride + block, inside, 0.0)
    to = rows + row * row_stride + tl.load(first + block, there, 0) + j
    tl.store(to, decoded(code, scale, j, real, 8, WIDTH).to(rows.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["blocks", "senders", "own", "codes_stride", "scales_stride"])
def _add(  # type: ignore[no-untyped-def]
    row,
    codes,
    scales,
    first,
    count,
    blocks,
    senders,
    own,
    codes_stride,
    scales_stride,
    DIVISOR: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    real: tl.constexpr = scales.dtype.element_ty
    element = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    block = element // WIDTH
    j = element % WIDTH
    there = block < blocks
    inside = there & (j < tl.load(count + block, there, 0))
    at = row + tl.load(first + block, there, 0) + j
    divisor = tl.full((1,), DIVISOR, real)
    factor = tl.full((1,), FACTOR, real)
    total = divided(tl.load(at, inside, 0.0).to(real), divisor) * factor
    code_at = codes + element
    scale_at = scales + block
    for sender in range(senders):
        code = tl.load(code_at, inside, 0)
        scale = tl.load(scale_at, inside, 0.0)
        summand = decoded(code, divided(scale, divisor) * factor, j, real, 8, WIDTH)
        total = tl.where(sender == own, total, total + summand)
        code_at += codes_stride
        scale_at += scales_stride
    tl.store(at, total.to(row.dtype.element_ty), inside)


# ---- on the host ---------------------------------------------------------------------------------


class TritonBlocks(Blocks):
    """Implements `Part` with Triton, on the current stream; needs no copies, and never waits."""

    def __init__(
        self, pieces: Sequence[Piece], code: BlockCode, dtype: torch.dtype, scratch: Memory
    ) -> None:
        super().__init__(pieces, code, dtype, scratch)
        size = code.block_size
        places = [
            (piece.start + begin, min(size, piece.numel - begin))
            for piece in pieces
            for begin in range(0, piece.numel, size)
        ]
        first, count = torch.tensor(places).view(-1, 2).t().contiguous().unbind(0)
        self._first = first.to(scratch.device)
        self._count = count.int().to(scratch.device)
        self._device = scratch.device
        self._padded = triton.next_power_of_2(size)
        self._per_program = max(1, TILE // self._padded)

    def encode(self, rows: torch.Tensor, sections: torch.Tensor) -> None:
        numbers = self._per_program * self._padded
        self._launch(
            _encode,
            -(-len(self._first) // self._per_program),
            rows,
            sections,
            LEVELS=self.code.levels,
            MOST=self.largest_scale,
            TINY=torch.finfo(self.real).tiny,
            PADDED=self._padded,
            ROWS=self._per_program,
            num_warps=min(16, max(4, numbers // 1024)),
        )

    def decode(self, sections: torch.Tensor, rows: torch.Tensor) -> None:
        self._launch(_decode, self._tiles, rows, sections, PER_PROGRAM=TILE)

    def add(self, row: torch.Tensor, sections: torch.Tensor, own: int, weigh: Weigh) -> None:
        codes = self.codes(sections)
        scales = self.scales(sections)
        launch(
            _add,
            (self._tiles,),
            self._device,
            row,
            codes,
            scales,
            self._first,
            self._count,
            len(self._first),
            len(sections),
            own,
            codes.stride(0),
            scales.stride(0),
            DIVISOR=weigh.divisor,
            FACTOR=weigh.factor,
            WIDTH=self.code.block_size,
            PER_PROGRAM=TILE,
        )

    @property
    def _tiles(self) -> int:
        return -(-len(self._first) * self.code.block_size // TILE)

    def _launch(
        self,
        kernel: object,
        programs: int,
        rows: torch.Tensor,
        sections: torch.Tensor,
        **options: object,
    ) -> None:
        codes = self.codes(sections)
        scales = self.scales(sections)
        launch(
            kernel,
            (programs, len(rows)),
            self._device,
            rows,
            codes,
            scales,
            self._first,
            self._count,
            len(self._first),
            rows.stride(0),
            codes.stride(0),
            scales.stride(0),
            WIDTH=self.code.block_size,
            **options,
        )


# ---- the comparison with torch -------------------------------------------------------------------


@functools.cache
def build(device: torch.device, dtype: torch.dtype, code: BlockCode) -> str:
    """Compile the kernels for rows of `dtype`, and compare them with torch. Waits for the device.
    Returns an id. Raises HookConfigError if they cannot be compiled or run, or compute other bits.
    """
    return checked_build(
        lambda: results_of(TorchBlocks, device, dtype, code),
        lambda: results_of(TritonBlocks, device, dtype, code),
        f"rows of {dtype} on {device}",
    )


@torch.no_grad()
def results_of(
    kernel: NewBlocks,
    device: torch.device,
    dtype: torch.dtype,
    code: BlockCode,
) -> bytes:
    """Return the bits of decoded rows and of sums."""
    size = code.block_size
    sizes = (3 * size + 5, 1, size - 1, 2 * size)
    pieces = []
    start = 1  # after an element that is not aligned
    for numel in sizes:
        pieces.append(Piece(str(numel), start, numel))
        start += numel + 3  # elements that are not compressed
    part = kernel(pieces, code, dtype, Memory(device))
    rows = torch.stack([hard_numbers(start, 100 * row, dtype) for row in range(3)])
    rows[1, 2 * size] = float("inf")
    rows[2, 3 * size] = float("nan")
    sections = torch.zeros(3, part.nbytes + 8 - part.nbytes % 8, dtype=torch.uint8, device=device)
    sections = sections[:, : part.nbytes]
    part.encode(rows.to(device), sections)
    results = [rows.new_full(rows.shape, 7.0).to(device)]
    part.decode(sections, results[0])
    for own, weigh in enumerate((Weigh(), Weigh(divisor=3), Weigh(factor=0.3))):
        total = rows[own].to(device)
        part.add(total, sections.clone(), own, weigh)
        results.append(total)
    return b"".join(map(bits_of, results))
