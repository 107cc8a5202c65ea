"""The C kernel of the quantised mean (`native/blocks.c`): load it, call it, and tell this machine's build apart."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.tables import ARGUMENTS, Table, address
from commhooks.compressors.quantized.blocks import BlockCode

SOURCE = Path(__file__).parent / "native" / "blocks.c"
FLAGS = ("-ffp-contract=off", "-fno-trapping-math")
"""Every operation is rounded, as torch's are. Nobody looks at floating-point exceptions."""


class PieceTable(Table):
    """Pieces of tensors, in whole blocks: the number of elements and the block size, then addresses."""

    fields = ("numel", "block", "bucket", "residual", "codes", "scales", "arrived_codes", "arrived_scales")

    @staticmethod
    def elements_of(row: Sequence[int]) -> int:
        return row[0]


@functools.cache
def load(dtype: torch.dtype = torch.float32) -> ctypes.CDLL:
    """Load the kernel for a compute dtype, float32 or float64; compile it first if the cache does not hold it. See
    `native/blocks.c` for its functions.

    Raises:
        HookConfigError: see `library.load`.
    """
    number, size = ctypes.c_double, ctypes.c_size_t
    loaded = library.load(SOURCE, FLAGS, dtype)
    loaded.commhooks_dequantise.argtypes = [*ARGUMENTS, ctypes.c_int]
    loaded.commhooks_quantise.argtypes = [*ARGUMENTS, ctypes.c_int, number, number, size, size, size]
    return loaded


def build() -> str:
    """`Kernel.build` of this machine. Raises HookConfigError if the kernel cannot be loaded."""
    return library.build_of(SOURCE, lambda dtype: results_of(load(dtype), dtype))


@functools.cache
def results_of(kernel: ctypes.CDLL, dtype: torch.dtype) -> bytes:
    """What the kernel computes from fixed numbers. All builds of one source should agree; one whose compiler joins
    multiplications and additions nevertheless does not."""
    results, numel = [], 1003
    for code in (BlockCode(8, 64), BlockCode(4, 48)):
        blocks = code.blocks_of(numel)
        bucket, residual = library.fixed_numbers(numel, 1, dtype), library.fixed_numbers(numel, 2, dtype)
        codes = torch.zeros(2, blocks * code.block_bytes, dtype=torch.uint8)
        scales = torch.zeros(2, blocks, dtype=dtype)
        gradients = [address(each, dtype, numel) for each in (bucket, residual)]
        arrived = [address(codes, torch.uint8, codes.numel()), address(scales, dtype, 2 * blocks)]
        most = code.largest_scale(torch.finfo(dtype).max, dtype)
        for which, start in enumerate((0, 1)):
            own = [address(codes[which], torch.uint8, codes[0].numel()), address(scales[which], dtype, blocks)]
            rows = PieceTable([[numel, code.block_size, *gradients, *own, *arrived]], dtype)
            rows.run(kernel.commhooks_quantise, code.bits, most, 0.7 + start, 1, 0, 0)
        rows.run(kernel.commhooks_quantise, code.bits, most, 0.7, 2, 1, 0)
        rows.run(kernel.commhooks_dequantise, code.bits)
        results += [bucket, residual, codes, scales]
    return b"".join(each.numpy().tobytes() for each in results)
