"""The native kernels read and write nothing beyond what they are given: before and after it lies memory that ends a
process that touches it."""

import ctypes
import itertools
import mmap
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.tables import PieceTable, address
from commhooks.compressors.powersgd import cpu
from commhooks.compressors.powersgd.cpu import NativeProducts
from commhooks.compressors.quantized.mean import BlockCode
from tests.support.compilers import needs_compiler

pytestmark = [needs_compiler, pytest.mark.skipif(sys.platform != "linux", reason="mprotect")]

PROT_NONE = 0
DTYPES = (torch.float32, torch.float64)
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129)


def guarded(values: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """A copy of `values` that touches the end, or the beginning, of the memory that may be used."""
    size, page = values.numel() * values.itemsize, mmap.PAGESIZE
    middle = -(-size // page) * page
    memory = mmap.mmap(-1, middle + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for place in (start, start + page + middle):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(place), page, PROT_NONE) == 0
    offset = page + (middle - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=offset)
    return copy.copy_(values.reshape(-1)).view(values.shape)


def _numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return library.fixed_numbers(torch.Size(shape).numel(), 1, dtype).view(shape)


def _touch_beyond() -> None:
    ctypes.memset(guarded(torch.zeros(5), at_end=True).data_ptr(), 0, 21)


def test_a_byte_beyond_ends_the_process(run_ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"died \(exit code -11\)"):
        run_ranks(_touch_beyond, world_size=1, init=False)


def _low_rank() -> int:
    """P, Q, orthonormal rows and the split of matrices, whose factors lie at edges, too."""
    calls = 0
    shapes = [*itertools.product(LENGTHS[:12], LENGTHS[:12], (1, 2)), (37, 1061, 4), (129, 131, 7), (101, 8209, 6)]
    for dtype, at_end, (n, m, rank) in itertools.product(DTYPES, (False, True), shapes):
        rank = min(rank, n, m)

        def packed(shapes: Any, dtype: torch.dtype, at_end: bool = at_end) -> Any:
            ((r, length),) = shapes
            flat = guarded(torch.zeros(r * length, dtype=dtype), at_end=at_end)
            return flat, [flat.view(r, length)]

        def own(*shape: int, dtype: torch.dtype = dtype, at_end: bool = at_end) -> torch.Tensor:
            return guarded(_numbers(*shape, dtype=dtype), at_end=at_end)

        with mock.patch.object(cpu, "_packed", packed):
            products = NativeProducts([(n, m, rank)], dtype)
        refill_p, refill_q = own(rank, n), own(rank, m)
        delta, residual = own(n, m), own(n, m)
        products.unit_rows([own(rank, m)], lambda i, refill=refill_q: refill)
        products.form_p([delta], [residual], 0.7)
        products.orthonormalize([own(rank, n).zero_()], lambda i, refill=refill_p: refill)
        products.form_q([delta])
        products.split([0], [delta], [residual], [own(rank, m)])
        products.split([0], [delta], None, [own(rank, m)])
        calls += 6
    return calls


def _blocks() -> int:
    """Quantising alone, averaging what two ranks sent, and decoding."""
    calls = 0
    codes_of = (BlockCode(8, 64), BlockCode(4, 48), BlockCode(8, 2), BlockCode(4, 2))
    for dtype, at_end, numel, code in itertools.product(DTYPES, (False, True), (*LENGTHS, 1003), codes_of):
        blocks = code.blocks_of(numel)
        most = code.largest_scale(torch.finfo(dtype).max, dtype)
        bucket, residual = (guarded(_numbers(numel, dtype=dtype), at_end=at_end) for _ in range(2))
        size = blocks * code.block_bytes
        codes = guarded(torch.zeros(size, dtype=torch.uint8), at_end=at_end)
        scales = guarded(torch.zeros(blocks, dtype=dtype), at_end=at_end)
        arrived = guarded(torch.zeros(2, size, dtype=torch.uint8), at_end=at_end)
        arrived_scales = guarded(torch.ones(2, size, dtype=torch.uint8).to(dtype), at_end=at_end)
        places = [address(each, each.dtype, each.numel()) for each in (bucket, residual, codes, scales)]
        places += [address(arrived, torch.uint8, 2 * size), address(arrived_scales, dtype, blocks)]
        table = PieceTable([[numel, code.block_size, *places]], dtype)
        table.run("quantise", code.bits, most, 0.7, 1, 0, 0)
        table.run("quantise", code.bits, most, 0.7, 2, 0, size)
        table.run("dequantise", code.bits)
        calls += 3
    return calls


@pytest.mark.parametrize("work", [_low_rank, _blocks])
def test_nothing_beyond_the_edges_is_touched(run_ranks: Any, work: Any) -> None:
    (calls,) = run_ranks(work, world_size=1, init=False)
    assert calls > 500
