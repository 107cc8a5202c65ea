"""Compute the quantised mean with Triton on CUDA devices, in four kernels and a fill per bucket.

The kernels perform the same operations in the same order as torch in `kernels.py`, and round each
of them, so the bits are equal. Before a device is used, `build` compares them on a small bucket.
"""

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from commhooks.compressors.native import library
from commhooks.compressors.quantized.kernels import BlockBuffers, TorchKernel
from commhooks.compressors.quantized.mean import (
    Averaged,
    BlockCode,
    BlockKernel,
    Good,
    Residuals,
    ShareMessages,
    mean_over_ranks,
)
from commhooks.errors import HookConfigError
from commhooks.gradients.layout import Slot, bytes_of
from commhooks.gradients.loss_scale import LossScale, is_one
from commhooks.gradients.precision import compute_dtype

TILE = 2048
"""Elements per program, or more if a block has more."""
_ROUNDED = {"enable_fp_fusion": False}
"""Launch options: no multiplication is fused with an addition, because torch rounds both."""


# ---- on the device -------------------------------------------------------------------------------


@triton.jit
def divided(x, y):  # type: ignore[no-untyped-def]
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)  # `/` is not correctly rounded in float32


@triton.jit
def _rounded(x):  # type: ignore[no-untyped-def]
    """Return `torch.round(x)` for x between -127 and 127: ties to even, and -0.0 stays.

    Adding 1.5 * 2^23 in float32 (1.5 * 2^52 in float64) leaves no bits for the fraction, so the
    addition rounds.
    """
    beyond: tl.constexpr = 6755399441055744.0 if x.dtype == tl.float64 else 12582912.0
    whole = (x + beyond) - beyond
    return tl.where(whole == 0, x * 0, whole)


@triton.jit
def decoded(codes, scale, j, real: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    if BITS == 8:
        return codes.to(tl.int8, bitcast=True).to(real) * scale
    else:
        return (((codes.to(tl.int32) >> (j // WIDTH * 4)) & 15) - 8).to(real) * scale


@triton.jit
def scales_of(  # type: ignore[no-untyped-def]
    x,
    real: tl.constexpr,
    LEVELS: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the scale of each block of `x` (ROWS x PARTS x PADDED), as kernels.py does."""
    # The largest |x|. As integers, the bits of nonnegative floats have the order of the numbers,
    # with inf and NaN last.
    integer: tl.constexpr = tl.int64 if real == tl.float64 else tl.int32
    top = tl.max(tl.max(tl.abs(x).to(integer, bitcast=True), 2), 1).to(real, bitcast=True)
    levels = tl.full((ROWS,), LEVELS, real)
    scale = tl.where(top < float("inf"), divided(top, levels), float("nan"))
    most = tl.full((ROWS,), MOST, real)
    scale = tl.where(scale > most, most, scale)
    return tl.where(scale < tl.full((ROWS,), TINY, real), 0.0, scale)


@triton.jit
def integers_of(x, scale, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return round(x / scale), clamped to LEVELS; 0 where the scale is 0, LEVELS for NaN."""
    whole = divided(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
    # also turns NaN into LEVELS, so that it has a code
    whole = tl.where(whole < LEVELS, whole, LEVELS)
    return _rounded(tl.where(whole > -LEVELS, whole, -LEVELS))


@triton.jit
def _block_elements(  # type: ignore[no-untyped-def]
    blocks,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the blocks of this program (ROWS), whether each exists, and the places of its elements
    in the block (1 x PARTS x PADDED), with whether each exists. A block is PARTS x WIDTH numbers: a
    byte has a code of each part.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < blocks
    column = tl.arange(0, PADDED)[None, None, :]
    j = tl.arange(0, 8 // BITS)[None, :, None] * WIDTH + column
    return row, there, j, there[:, None, None] & (column < WIDTH)


@triton.jit
def put_codes(codes, whole, to, there, BITS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the integers of blocks (ROWS x PARTS x PADDED), a row of WIDTH bytes at `to` for each
    block that is `there`.
    """
    code = whole.to(tl.int32)
    if BITS == 4:
        code = (code + 8) << (tl.arange(0, 8 // BITS)[None, :, None] * 4)
    byte = (tl.sum(code, 1) & 255).to(tl.uint8)
    column = tl.arange(0, byte.shape[1])[None, :]
    tl.store(codes + to[:, None] + column, byte, there[:, None] & (column < WIDTH))


@triton.jit(do_not_specialize=["blocks", "share", "rank", "codes_stride", "scales_stride"])
def _quantise(  # type: ignore[no-untyped-def]
    flat,
    delta,
    residual,
    factor,
    first,
    count,
    tensor,
    flags,
    places,
    codes,
    scales,
    blocks,
    share,
    rank,
    codes_stride,
    scales_stride,
    LEVELS: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Quantise all blocks of gradient + factor * residual into the messages to their owners, and
    leave the rounding errors in `delta`, or this rank's blocks.
    """
    row, there, j, valid = _block_elements(blocks, BITS, WIDTH, PADDED, ROWS)
    real: tl.constexpr = delta.dtype.element_ty
    in_blocks = row[:, None, None] * (8 // BITS * WIDTH) + j
    inside = valid & (j < tl.load(count + row, there, 0)[:, None, None])
    x = tl.load(flat + tl.load(first + row, there, 0)[:, None, None] + j, inside, 0.0).to(real)
    nonzero = tl.max(tl.max((x != 0).to(tl.int32), 2), 1)
    flag = flags + tl.load(tensor + row, there, 0)
    tl.store(flag, nonzero.to(tl.uint8), there & (nonzero != 0))
    if FEEDBACK:
        before = tl.load(residual + in_blocks, inside, 0.0)
        x += before * tl.load(factor).to(real) if SCALED else before
    scale = scales_of(x, real, LEVELS, MOST, TINY, ROWS)
    whole = integers_of(x, scale[:, None, None], LEVELS)
    at = tl.load(places + row, there, 0)
    owner = at // share
    mine = (owner == rank)[:, None, None]
    tl.store(delta + in_blocks, tl.where(mine, x, x - whole * scale[:, None, None]), valid)
    put_codes(codes, whole, owner * codes_stride + at % share * WIDTH, there, BITS, WIDTH)
    tl.store(scales + owner * scales_stride + at % share, scale, there)


@triton.jit(do_not_specialize=["blocks"])
def _quantise_mean(  # type: ignore[no-untyped-def]
    delta,
    owned,
    codes,
    scales,
    blocks,
    LEVELS: tl.constexpr,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    RANKS: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantise `delta` of this rank's blocks into the message to all ranks, and leave the rounding
    errors, times RANKS.
    """
    row, there, j, valid = _block_elements(blocks, BITS, WIDTH, PADDED, ROWS)
    real: tl.constexpr = delta.dtype.element_ty
    in_blocks = tl.load(owned + row, there, 0)[:, None, None] * (8 // BITS * WIDTH) + j
    x = tl.load(delta + in_blocks, valid, 0.0)
    scale = scales_of(x, real, LEVELS, MOST, TINY, ROWS)
    whole = integers_of(x, scale[:, None, None], LEVELS)
    tl.store(delta + in_blocks, (x - whole * scale[:, None, None]) * RANKS, valid)
    put_codes(codes, whole, row * WIDTH, there, BITS, WIDTH)
    tl.store(scales + row, scale, there)


@triton.jit(do_not_specialize=["blocks", "rank", "codes_stride", "scales_stride"])
def _average(  # type: ignore[no-untyped-def]
    delta,
    owned,
    codes,
    scales,
    blocks,
    rank,
    codes_stride,
    scales_stride,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    HALVINGS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Average this rank's blocks into `delta`.

    Its own part is not rounded; codes * scales are those of the other ranks. The additions are the
    same as in `sum_in_pairs`. A missing rank is -0.0, which changes no bit of a sum.
    """
    real: tl.constexpr = delta.dtype.element_ty
    SIZE: tl.constexpr = 8 // BITS * WIDTH
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = element < blocks * SIZE
    row = element // SIZE
    j = (element % SIZE).to(tl.int32)
    number = tl.load(owned + row, there, 0) * SIZE + j
    ranks = tl.full((1,), RANKS, real)
    mine = divided(tl.load(delta + number, there, 0.0), ranks)
    sender = tl.arange(0, 2**HALVINGS)[:, None]
    exists = there[None, :] & (sender < RANKS)
    byte_at = sender.to(tl.int64) * codes_stride + (row * WIDTH + j % WIDTH)[None, :]
    byte = tl.load(codes + byte_at, exists, 0)
    scale_at = sender.to(tl.int64) * scales_stride + row[None, :]
    scale = divided(tl.load(scales + scale_at, exists, 0.0), ranks[None, :])
    parts = decoded(byte, scale, j[None, :], real, BITS, WIDTH)
    parts = tl.where(sender == rank, mine[None, :], parts)
    parts = tl.where(sender < RANKS, parts, -0.0)
    for i in tl.static_range(HALVINGS):
        parts = tl.sum(tl.reshape(parts, (2, 2 ** (HALVINGS - 1 - i), TILE)), 0)
    tl.store(delta + number, tl.reshape(parts, (TILE,)), there)


@triton.jit(do_not_specialize=["blocks", "share", "codes_stride", "scales_stride"])
def _store(  # type: ignore[no-untyped-def]
    flat,
    delta,
    residual,
    factor,
    good,
    first,
    count,
    tensor,
    flags,
    places,
    codes,
    scales,
    blocks,
    share,
    codes_stride,
    scales_stride,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    SCALED: tl.constexpr,
):
    real: tl.constexpr = delta.dtype.element_ty
    SIZE: tl.constexpr = 8 // BITS * WIDTH
    element = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = element // SIZE
    j = (element % SIZE).to(tl.int32)
    there = row < blocks
    valid = there & (j < tl.load(count + row, there, 0))
    at = tl.load(places + row, there, 0)
    owner = at // share
    place = at % share
    used = tl.load(flags + tl.load(tensor + row, there, 0), there, 0) != 0
    if FEEDBACK:
        committed = tl.load(good) != 0
        before = tl.load(residual + element, valid, 0.0)
        if SCALED:
            before = tl.where(committed, before * tl.load(factor).to(real), before)
        lost = tl.load(delta + element, valid, 0.0)
        tl.store(residual + element, tl.where(used & committed, lost, before), valid)
    byte = tl.load(codes + owner * codes_stride + place * WIDTH + j % WIDTH, valid, 0)
    scale = tl.load(scales + owner * scales_stride + place, valid, 0.0)
    mean = tl.where(used, decoded(byte, scale, j, real, BITS, WIDTH), 0.0)
    tl.store(flat + tl.load(first + row, there, 0) + j, mean.to(flat.dtype.element_ty), valid)


# ---- on the host ---------------------------------------------------------------------------------


class TritonKernel:
    """Implements `BlockKernel` with Triton, on the current stream; the host never waits."""

    def __init__(self, buffers: BlockBuffers, messages: ShareMessages, rank: int) -> None:
        self.messages = messages
        self.rank = rank
        self._buffers = buffers
        code = messages.code
        device = messages.sent.device
        rows = [
            (slot.offset + begin, min(code.block_size, slot.numel - begin))
            for slot in buffers.slots
            for begin in range(0, slot.numel, code.block_size)
        ]
        first, count = torch.tensor(rows).t().contiguous().unbind(0)
        self._blocks = len(rows)
        self._owned = messages.shares.blocks[rank]
        self._of_block = (first.to(device), count.int().to(device), buffers.slot_of_block)
        width = code.block_bytes
        self._code = {"BITS": code.bits, "WIDTH": width}
        padded = triton.next_power_of_2(width)
        self._rows = max(1, TILE // (8 // code.bits * padded))
        self._quantising = {
            **self._code,
            "LEVELS": code.levels,
            "MOST": messages.most,
            "TINY": torch.finfo(messages.dtype).tiny,
            "PADDED": padded,
            "ROWS": self._rows,
            "num_warps": min(16, max(4, self._rows * padded * (8 // code.bits) // 1024)),
        }

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        self.messages.flags.zero_()
        buffers = self._buffers
        if buffers.residuals is not None:
            buffers.residuals.gather(residuals)
        self._quantise(flat, factor)

    def quantise(self) -> None:
        """Do nothing: `load` has quantised."""

    def average(self, arrived: torch.Tensor) -> None:
        messages = self.messages
        parts = messages.sections(arrived)
        blocks = messages.shares.counts[self.rank]
        halvings = (messages.world_size - 1).bit_length()
        tile = max(16, TILE >> halvings)
        self._launch(
            _average,
            blocks * messages.code.block_size,
            tile,
            self._buffers.delta,
            self._owned,
            parts.codes,
            parts.scales,
            blocks,
            self.rank,
            parts.codes.stride(0),
            parts.scales.stride(0),
            **self._code,
            RANKS=messages.world_size,
            HALVINGS=halvings,
            TILE=tile,
        )
        self._quantise_mean(blocks)

    def store(
        self,
        averaged: Averaged,
        flat: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: Good,
    ) -> None:
        messages = self.messages
        buffers = self._buffers
        parts = averaged.sections
        kept = buffers.delta if buffers.residuals is None else buffers.residuals.bind(residuals)
        first, count, tensor = self._of_block
        self._launch(
            _store,
            self._blocks * messages.code.block_size,
            TILE,
            flat,
            buffers.delta,
            kept,
            self._on_device(factor),
            torch.as_tensor(good, device=flat.device),
            first,
            count,
            tensor,
            averaged.flags.contiguous(),
            messages.shares.places,
            parts.codes,
            parts.scales,
            self._blocks,
            messages.shares.size,
            parts.codes.stride(0),
            parts.scales.stride(0),
            **self._code,
            TILE=TILE,
            FEEDBACK=buffers.residuals is not None,
            SCALED=not is_one(factor),
        )

    def _quantise(self, flat: torch.Tensor, factor: LossScale) -> None:
        messages = self.messages
        buffers = self._buffers
        residuals = buffers.residuals
        to = messages.in_sent
        first, count, tensor = self._of_block
        self._launch(
            _quantise,
            self._blocks,
            self._rows,
            flat,
            buffers.delta,
            buffers.delta if residuals is None else residuals.whole,
            self._on_device(factor),
            first,
            count,
            tensor,
            messages.flags,
            messages.shares.places,
            to.codes,
            to.scales,
            self._blocks,
            messages.shares.size,
            self.rank,
            to.codes.stride(0),
            to.scales.stride(0),
            **self._quantising,
            FEEDBACK=residuals is not None,
            SCALED=not is_one(factor),
        )

    def _quantise_mean(self, blocks: int) -> None:
        to = self.messages.in_mean
        self._launch(
            _quantise_mean,
            blocks,
            self._rows,
            self._buffers.delta,
            self._owned,
            to.codes,
            to.scales,
            blocks,
            **self._quantising,
            RANKS=self.messages.world_size,
        )

    def _on_device(self, factor: LossScale) -> torch.Tensor:
        if isinstance(factor, torch.Tensor):
            return factor
        # Not read if it is 1.
        return self._buffers.delta if factor == 1 else self._buffers.delta.new_full((), factor)

    def _launch(
        self, kernel: Any, work: int, per_program: int, *arguments: Any, **options: Any
    ) -> None:
        if work:
            grid = (-(-work // per_program),)
            launch(kernel, grid, self.messages.sent.device, *arguments, **options)


def launch(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any
) -> None:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **options, **_ROUNDED)


# ---- the comparison with torch -------------------------------------------------------------------


@functools.cache
def build(device: torch.device, dtype: torch.dtype, code: BlockCode) -> str:
    """Compile the kernels for gradients of `dtype`, and compare them with torch.

    Waits for the device. Returns an id; see `Compressor.native_build`. Raises HookConfigError if
    they cannot be compiled or run, or compute other bits.
    """
    return checked_build(
        lambda: results_of(TorchKernel, device, dtype, code),
        lambda: results_of(TritonKernel, device, dtype, code),
        f"{dtype} on {device}",
    )


def checked_build(by_torch: Callable[[], bytes], by_triton: Callable[[], bytes], what: str) -> str:
    """Return an id of the results, which must be equal. Raises HookConfigError otherwise."""
    expected = by_torch()
    try:
        computed = by_triton()
    except Exception as error:  # Triton's own, a missing compiler, a driver that is too old
        problem = f"cannot be compiled or run: {error!r:.300}".replace("\n", " ")
    else:
        problem = "" if computed == expected else "computes other bits than torch"
    if problem:
        raise HookConfigError(
            f"the kernel of Triton {triton.__version__} for {what} {problem}"
            f" ({library.SWITCH}=0 turns it off)"
        )
    return f"triton {hashlib.sha256(expected).hexdigest()[:12]}"


@torch.no_grad()
def results_of(
    kernel: Callable[[BlockBuffers, ShareMessages, int], BlockKernel],
    device: torch.device,
    dtype: torch.dtype,
    code: BlockCode,
    ranks: int = 3,
) -> bytes:
    """Return the bits of two steps on simulated ranks: gradients, flags and residuals."""
    sizes = (3 * code.block_size + 5, 1, code.block_size, code.block_size - 1, 2 * code.block_size)
    starts = list(itertools.accumulate(sizes, initial=1))  # after an element that is not aligned
    parameter = torch.empty(0, device=device)
    slots = [
        Slot(str(i), parameter, start, numel)
        for i, (start, numel) in enumerate(zip(starts, sizes, strict=False))
    ]
    tensors = [(slot.name, code.blocks_of(slot.numel)) for slot in slots]
    real = compute_dtype(dtype)
    most = torch.finfo(dtype).max
    kernels = []
    for rank in range(ranks):
        messages = ShareMessages(
            code, tensors, real, ranks, device, largest=most, plain=(0, dtype), flags=len(slots)
        )
        buffers = BlockBuffers(code, slots, real, device, error_feedback=True)
        kernels.append(kernel(buffers, messages, rank))
    residuals: list[Residuals] = [{} for _ in range(ranks)]
    results = []
    for step in range(2):
        flats = [_bucket(slots, step, rank, dtype).to(device) for rank in range(ranks)]
        factor = torch.full((), 0.7, device=device) if step else 1.0
        _run_step(kernels, flats, residuals, factor)
        for flat, made, of_rank in zip(flats, kernels, residuals, strict=True):
            results += [flat, made.messages.flags.clone()]
            results += [residual.clone() for residual in of_rank.values()]
    return b"".join(map(bits_of, results))


def _bucket(slots: list[Slot], step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's gradients.

    No rank has a gradient for slot 4, and in step 1 only rank 0 has one for slot 2. In step 1 slot
    3 has numbers that are not finite.
    """
    flat = hard_numbers(slots[-1].stop, 1000 * step + 100 * rank, dtype)
    slots[4].of(flat).zero_()
    if step:
        if rank > 0:
            slots[2].of(flat).zero_()
        slots[3].of(flat)[rank] = (float("nan"), float("inf"), 1.0)[rank % 3]
    return flat


def _run_step(
    kernels: list[BlockKernel],
    flats: list[torch.Tensor],
    residuals: list[Residuals],
    factor: LossScale,
) -> None:
    ranks = list(zip(kernels, flats, residuals, strict=True))
    for kernel, flat, of_rank in ranks:
        kernel.load(flat, of_rank, factor)
    exchanges = [mean_over_ranks(kernel) for kernel in kernels]
    shares = torch.stack([next(exchange).tensor for exchange in exchanges])
    arrived = shares.transpose(0, 1).contiguous()
    means = torch.stack(
        [exchange.send(parts).tensor for exchange, parts in zip(exchanges, arrived, strict=True)]
    )
    good = torch.ones((), dtype=torch.bool, device=means.device)
    for kernel, flat, of_rank in ranks:
        kernel.store(Averaged(kernel.messages, means), flat, of_rank, factor, good)


def hard_numbers(numel: int, start: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = library.fixed_numbers(numel, start, torch.float64)
    info = torch.finfo(dtype)
    places = torch.arange(numel)
    sizes = torch.tensor([1e-3, 1.0, 30.0, 0.1, 0.0], dtype=torch.float64)
    numbers *= sizes[places % 5]
    numbers[places % 97 == 5] *= info.tiny
    numbers[places % 89 == 7] *= info.max / 8
    return numbers.to(dtype)


def bits_of(tensor: torch.Tensor) -> bytes:
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)  # the bits of NaN may differ
    return bytes_of(tensor.cpu())
