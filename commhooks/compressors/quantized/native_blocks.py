"""The C kernel of the quantised mean (`native/blocks.c`): load it, call it, and tell this machine's build apart."""

import ctypes
import functools
import hashlib
from pathlib import Path

import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.fixed_numbers import fixed_numbers
from commhooks.compressors.native.tables import Table, address
from commhooks.compressors.native.threads import team
from commhooks.compressors.quantized.blocks import BlockCode

SOURCE = Path(__file__).parent / "native" / "blocks.c"
FLAGS = ("-ffp-contract=off", "-fno-trapping-math")
"""Every operation is rounded, as torch's are. Nobody looks at floating-point exceptions."""


class PieceTable(Table):
    """Pieces of tensors, in whole blocks: the number of elements and the block size, then addresses."""

    fields = ("numel", "block", "bucket", "residual", "codes", "scales", "arrived_codes", "arrived_scales")


class NativeBlocks:
    """One build of the kernel, for one compute dtype. `rows`: some rows of a `PieceTable`, one after another."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        number, size, pointer = ctypes.c_double, ctypes.c_size_t, ctypes.c_void_p
        self._quantise, self._dequantise = loaded.commhooks_quantise, loaded.commhooks_dequantise
        self._dequantise.argtypes = [pointer, ctypes.c_uint, size, pointer, ctypes.c_int]
        self._quantise.argtypes = [*self._dequantise.argtypes, number, number, size, size, size]

    def quantise(self, rows: torch.Tensor, bits: int, most: float, factor: float) -> None:
        """Quantise what is in the bucket plus `factor` times the residuals (fields that are not 0). Writes codes and
        scales; what is lost remains in the bucket.

        Args:
            most: the largest scale.
        """
        self._quantise(*_work(rows), bits, most, factor, 1, 0, 0)

    def average(
        self, rows: torch.Tensor, bits: int, most: float, factor: float, world_size: int, rank: int, stride: int
    ) -> None:
        """As `quantise`, for the mean over the ranks: their sum, divided by `world_size`, of what has arrived. What is
        lost of the mean remains in the bucket, times `world_size`.

        Args:
            rank: this one, whose own part is not among what has arrived.
            stride: bytes between what has arrived from one rank and from the next.
        """
        self._quantise(*_work(rows), bits, most, factor, world_size, rank, stride)

    def dequantise(self, rows: torch.Tensor, bits: int) -> None:
        """Move what is in the bucket to the residuals (fields that are not 0), and write what the codes and scales that
        have arrived say into the bucket."""
        self._dequantise(*_work(rows), bits)


def _work(rows: torch.Tensor) -> tuple[int | None, int, int, int]:
    start, threads = team(int(rows[:, 0].sum()))
    return start, threads, len(rows), rows.data_ptr()


@functools.cache
def load(dtype: torch.dtype = torch.float32) -> NativeBlocks:
    """Load the kernel for a compute dtype, float32 or float64; compile it first if the cache does not hold it.

    Raises:
        HookConfigError: see `library.load`.
    """
    return NativeBlocks(library.load(SOURCE, FLAGS, dtype))


def build() -> str:
    """`Kernel.build` of this machine. Raises HookConfigError if the kernel cannot be loaded."""
    digest = hashlib.sha256(library.source_text(SOURCE))
    for dtype in library.C_TYPES:
        digest.update(results_of(load(dtype), dtype))
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
        arrived = [address(codes, torch.uint8, codes.numel()), address(scales, dtype, 2 * blocks)]
        most = code.largest_scale(torch.finfo(dtype).max, dtype)
        for which, start in enumerate((0, 1)):
            own = [address(codes[which], torch.uint8, codes[0].numel()), address(scales[which], dtype, blocks)]
            rows = PieceTable([[numel, code.block_size, *gradients, *own, *arrived]], dtype).rows
            kernel.quantise(rows, code.bits, most, 0.7 + start)
        kernel.average(rows, code.bits, most, 0.7, 2, 1, 0)
        kernel.dequantise(rows, code.bits)
        results += [bucket, residual, codes, scales]
    return b"".join(each.numpy().tobytes() for each in results)
