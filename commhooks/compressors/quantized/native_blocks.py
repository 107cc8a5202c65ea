"""The work of `blocks` and `mean` on whole buckets as a small native kernel (`native/blocks.c`), for the CPU.

Not one bit of the results differs: the kernel makes the same operations in the same order, in fewer passes.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.tables import Table
from commhooks.compressors.native.threads import team
from commhooks.compressors.quantized.blocks import BlockCode

SOURCE = Path(__file__).parent / "native" / "blocks.c"
FLAGS = ("-ffp-contract=off", "-fno-trapping-math")
"""Every operation is rounded, as torch's are. Nobody looks at floating-point exceptions."""


class PieceTable(Table):
    """Pieces of parameters, in whole blocks: the number of elements and the block size, then addresses. Those of codes
    and scales are set by `point_from`: they lie in messages."""

    fields = ("numel", "block", "bucket", "residual", "codes", "scales", "arrived_codes", "arrived_scales")

    def __init__(self, rows: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self.elements = sum(row[0] for row in rows)


class NativeBlocks:
    """One build of the kernel, for one compute dtype."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self._library = loaded
        number, size = ctypes.c_double, ctypes.c_size_t
        for name, more in (
            ("quantise", [ctypes.c_int, number, number, size, size, size]),
            ("dequantise", [ctypes.c_int]),
        ):
            function = getattr(loaded, f"commhooks_{name}")
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint, size, ctypes.c_void_p, *more]
            function.restype = ctypes.c_int

    def quantise(self, table: PieceTable, code: BlockCode, most: float, factor: float) -> None:
        """Quantise what is in the bucket plus `factor` times the residuals (fields that are not 0). Writes codes and
        scales; what is lost remains in the bucket.

        Args:
            most: the largest scale.
        """
        self._call("quantise", table, code.bits, most, factor, 1, 0, 0)

    def average(
        self, table: PieceTable, code: BlockCode, most: float, factor: float, world_size: int, rank: int, stride: int
    ) -> None:
        """As `quantise`, for the mean over the ranks: their sum, divided by `world_size`, of what has arrived. What is
        lost of the mean remains in the bucket, times `world_size`.

        Args:
            rank: this one, whose own part is not among what has arrived.
            stride: bytes between what has arrived from one rank and from the next.
        """
        self._call("quantise", table, code.bits, most, factor, world_size, rank, stride)

    def dequantise(self, table: PieceTable, code: BlockCode) -> None:
        """Move what is in the bucket to the residuals (fields that are not 0), and write what codes and scales say into
        the bucket."""
        self._call("dequantise", table, code.bits)

    def _call(self, name: str, table: PieceTable, *more: float) -> None:
        start, threads = team(table.elements)
        getattr(self._library, f"commhooks_{name}")(start, threads, len(table), table.rows.data_ptr(), *more)


@functools.cache
def load(dtype: torch.dtype = torch.float32) -> NativeBlocks:
    """Load the kernel for a compute dtype, float32 or float64; compile it first if the cache does not hold it.

    Raises:
        HookConfigError: see `library.load`.
    """
    return NativeBlocks(library.load(SOURCE, FLAGS, dtype))
