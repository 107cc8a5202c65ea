"""Runs the Triton kernels of shards on CPU tensors, in Triton's interpreter, and compares them with
torch's operators; or compiles them for NVIDIA GPUs. `test_shards_triton.py` starts it.

    TRITON_INTERPRET=1 python -m tests.sharded.triton_shards kernels|codec|faults
    python -m tests.sharded.triton_shards instructions
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from commhooks.compressors.quantized.mean import BlockCode
from commhooks.sharded import codec as codec_module
from commhooks.sharded import triton_kernel
from commhooks.sharded.blocks import TorchBlocks
from commhooks.sharded.triton_kernel import TritonBlocks, build, results_of
from tests.compressors.quantized.triton_bits import compiled, messages_of, run_one
from tests.sharded.test_shards_codec import differing_from_oracle

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def kernels() -> list[str]:
    """Cases in which the bits differ."""
    return [
        f"{code} {dtype}"
        for code in (BlockCode(8, 128), BlockCode(8, 48), BlockCode(8, 16))
        for dtype in DTYPES
        if results_of(TorchBlocks, CPU, dtype, code) != results_of(TritonBlocks, CPU, dtype, code)
    ]


def codec() -> list[str]:
    """Pieces of whole messages that differ from the oracle."""
    with mock.patch.object(codec_module, "native_blocks", lambda device: TritonBlocks):
        return [
            f"{dtype} {piece}"
            for dtype in DTYPES
            for piece in differing_from_oracle(dtype, native=True)
        ]


def faults() -> list[str]:
    """What `build` says of kernels that are wrong, or cannot run."""

    def launched(change: Callable[[dict[str, Any]], Any]) -> Any:
        real = triton_kernel.launch
        return lambda kernel, grid, device, *given, **options: (
            change(options) or real(kernel, grid, device, *given, **options)
        )

    changes = (
        lambda options: options.update(LEVELS=126) if "LEVELS" in options else None,
        lambda options: options.update(DIVISOR=1) if "DIVISOR" in options else None,
        lambda options: options.update(FACTOR=1.0) if "FACTOR" in options else None,
        lambda options: options["unknown"],
    )
    return messages_of(build, triton_kernel, "launch", map(launched, changes))


def instructions() -> list[str]:
    pointers = {"codes": "*u8", "scales": "*fp32", "first": "*i64", "count": "*i32"}
    pointers |= {"rows": "*bf16", "row": "*bf16"}
    options = {"LEVELS": 127, "MOST": 1e30, "TINY": 1e-38, "WIDTH": 32, "PADDED": 32, "ROWS": 8}
    options |= {"PER_PROGRAM": 128, "DIVISOR": 3, "FACTOR": 0.3}
    found: set[str] = set()
    for kernel in (triton_kernel._encode, triton_kernel._decode, triton_kernel._add):
        found |= compiled(kernel, pointers, options)
    return sorted(found)


if __name__ == "__main__":
    run_one(sys.argv[1], kernels, codec, faults, instructions)
