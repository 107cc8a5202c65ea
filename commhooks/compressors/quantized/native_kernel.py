"""What tells this machine's build of the quantised hooks' native kernel apart from those of other machines."""

import functools
import hashlib

import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.fixed_numbers import fixed_numbers
from commhooks.compressors.native.tables import address
from commhooks.compressors.quantized import native_blocks
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.native_blocks import NativeBlocks, PieceTable


def build() -> str:
    """`Kernel.build` of this machine. Raises HookConfigError if the kernel cannot be loaded."""
    digest = hashlib.sha256(library.source_text(native_blocks.SOURCE))
    for dtype in library.C_TYPES:
        digest.update(results_of(native_blocks.load(dtype), dtype))
    return digest.hexdigest()[:12]


@functools.cache
def results_of(kernel: NativeBlocks, dtype: torch.dtype) -> bytes:
    """What the kernel computes from fixed numbers. All builds of one source should agree; one whose compiler joins
    multiplications and additions nevertheless does not."""
    results, numel = [], 1003
    for code in (BlockCode(8, 64), BlockCode(4, 48)):
        blocks = code.blocks_of(numel)
        bucket, residual = fixed_numbers(numel, 1, dtype), fixed_numbers(numel, 2, dtype)
        codes = torch.zeros(2, blocks * code.block_bytes, dtype=torch.uint8)
        scales = torch.zeros(2, blocks, dtype=dtype)
        gradients = [address(each, dtype, numel) for each in (bucket, residual)]
        arrived = [address(codes, torch.uint8, 2 * blocks * code.block_bytes), address(scales, dtype, 2 * blocks)]
        most = code.largest_scale(torch.finfo(dtype).max, dtype)
        for which, start in enumerate((0, 1)):
            own = [address(codes[which], torch.uint8, blocks * code.block_bytes), address(scales[which], dtype, blocks)]
            table = PieceTable([[numel, code.block_size, *gradients, *own, *arrived]], dtype)
            kernel.quantise(table, code, most, 0.7 + start)
        kernel.average(table, code, most, 0.7, 2, 1, 0)
        kernel.dequantise(table, code)
        results += [bucket, residual, codes, scales]
    return b"".join(each.numpy().tobytes() for each in results)
