"""The C kernels read and write nothing beyond what they are given: guard pages end the process."""

import ctypes
import functools
import itertools
import mmap
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import commhooks
from commhooks.compressors.native import library
from commhooks.compressors.native.tables import PieceTable, address
from commhooks.compressors.powersgd.cpu import NativeProducts
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.registry import compressor_of
from tests.support.compilers import needs_compiler
from tests.support.kernels import computing_with
from tests.support.models import same_bits
from tests.support.simulation import SimulatedRanks

pytestmark = [needs_compiler, pytest.mark.skipif(sys.platform != "linux", reason="mprotect")]

PROT_NONE = 0
DTYPES = (torch.float32, torch.float64)
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129)


@functools.cache
def _protect() -> Any:
    return ctypes.CDLL(None).mprotect


def guarded(values: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """A copy of `values` that touches the end, or the beginning, of the memory that may be used."""
    size = values.numel() * values.itemsize
    page = mmap.PAGESIZE
    middle = -(-size // page) * page
    memory = mmap.mmap(-1, middle + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for place in (start, start + page + middle):
        assert _protect()(ctypes.c_void_p(place), page, PROT_NONE) == 0
    offset = page + (middle - size if at_end else 0)
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=offset)
    return copy.copy_(values.reshape(-1)).view(values.shape)


class Guarded(TorchDispatchMode):
    """In the body every new tensor is `guarded`, also those of workspaces and tables."""

    def __init__(self, *, at_end: bool) -> None:
        super().__init__()
        self._at_end = at_end

    def __enter__(self) -> Any:
        new = torch.tensor
        self._patch = mock.patch(
            "torch.tensor", lambda *args, **more: guarded(new(*args, **more), at_end=self._at_end)
        )
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and all(
            returned.alias_info is None for returned in func._schema.returns
        )
        return (
            guarded(result, at_end=self._at_end)
            if is_new and result.numel() and result.is_contiguous()
            else result
        )


def _numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return library.fixed_numbers(torch.Size(shape).numel(), 1, dtype).view(shape)


def _touch_beyond() -> None:
    with Guarded(at_end=True):
        ctypes.memset(torch.zeros(5).data_ptr(), 0, 21)


def test_a_byte_beyond_ends_the_process(run_ranks: Any) -> None:
    with pytest.raises(AssertionError, match=r"died \(exit code -11\)"):
        run_ranks(_touch_beyond, world_size=1, init=False)


def _low_rank() -> int:
    """P, Q, orthonormal rows and the split of single matrices."""
    calls = 0
    # Every length with a third of the others: the loops over rows and over columns have their own
    # ends.
    pairs = [
        (n, m)
        for i, n in enumerate(LENGTHS[:12])
        for j, m in enumerate(LENGTHS[:12])
        if (i + j) % 3 == 0
    ]
    shapes = [
        *((n, m, rank) for n, m in pairs for rank in (1, 2)),
        (37, 1061, 4),
        (129, 131, 7),
        (101, 8209, 6),
    ]
    for dtype, at_end, (n, m, rank) in itertools.product(DTYPES, (False, True), shapes):
        rank = min(rank, n, m)

        def own(*shape: int, dtype: torch.dtype = dtype, at_end: bool = at_end) -> torch.Tensor:
            return guarded(_numbers(*shape, dtype=dtype), at_end=at_end)

        with Guarded(at_end=at_end):
            products = NativeProducts([(n, m, rank)], dtype)
        refill_p, refill_q = own(rank, n), own(rank, m)
        delta, residual = own(n, m), own(n, m)
        products.unit_rows([own(rank, m)], lambda i, refill=refill_q: refill)
        products.form_p([delta], [residual], 0.7)
        products.orthonormalize([own(rank, n).zero_()], lambda i, refill=refill_p: refill)
        products.form_q([delta])
        products.reconstruct([0], [delta], [residual], [own(rank, m)])
        products.reconstruct([0], [delta], None, [own(rank, m)])
        calls += 6
    return calls


def _blocks() -> int:
    """Quantising alone, averaging what two ranks sent, and decoding."""
    calls = 0
    codes_of = (BlockCode(8, 64), BlockCode(4, 48), BlockCode(8, 2), BlockCode(4, 2))
    for dtype, at_end, numel, code in itertools.product(
        DTYPES, (False, True), (*LENGTHS, 1003), codes_of
    ):
        blocks = code.blocks_of(numel)
        most = code.largest_scale(torch.finfo(dtype).max, dtype)
        size = blocks * code.block_bytes
        with Guarded(at_end=at_end):
            bucket = _numbers(numel, dtype=dtype).clone()
            residual = _numbers(numel, dtype=dtype).clone()
            codes, scales = torch.zeros(size, dtype=torch.uint8), torch.zeros(blocks, dtype=dtype)
            arrived = torch.zeros(2, size, dtype=torch.uint8)
            arrived_scales = torch.ones(2, size).to(dtype)
            places = [
                address(tensor, tensor.dtype, tensor.numel())
                for tensor in (bucket, residual, codes, scales)
            ]
            places += [
                address(arrived, torch.uint8, 2 * size),
                address(arrived_scales, dtype, blocks),
            ]
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


# ---- whole steps, with the tables of pointers that the hooks make --------------------------------

SHAPES = {
    "a": (7, 33),
    "bias": (5,),
    "idle": (16, 9),
    "b": (1, 150),
    "c": (65, 17),
    "d": (3, 3, 11),
    "one": (1, 1),
}
CONFIGS: dict[str, commhooks.HookConfig] = {
    "powerSGD": commhooks.PowerSGD(
        matrix_approximation_rank=3, start_powerSGD_iter=0, min_compression_rate=0.1
    ),
    "rank 1": commhooks.PowerSGD(
        start_powerSGD_iter=0, min_compression_rate=0.1, use_error_feedback=False
    ),
    "batched": commhooks.BatchedPowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0),
    "int8": commhooks.Int8Compress(block_size=16),
    "int4": commhooks.Int4Compress(block_size=32),
    "int4, no error feedback": commhooks.Int4Compress(block_size=16, use_error_feedback=False),
}


def _steps(name: str, dtype: torch.dtype, world_size: int) -> list[torch.Tensor]:
    """Averages and residuals after some steps. A parameter has no gradient at first, and one step
    is not finite.
    """
    config = CONFIGS[name]
    ranks = SimulatedRanks(
        lambda: compressor_of(config)(config),
        world_size,
        {n: torch.zeros(s, dtype=dtype) for n, s in SHAPES.items()},
    )
    results = []
    for step in range(4):
        buckets = []
        for rank in range(world_size):
            bucket = _numbers(ranks.layout.numel + rank, dtype=dtype)[rank:] * (step + 1)
            idle = ranks.layout.slots[2].of(bucket)
            idle.mul_(step != 0)
            bucket[3] = float("nan") if (rank, step) == (0, 2) else bucket[3]
            buckets.append(bucket)
        assert ranks.step(buckets) == (step != 2)
        results += [bucket.nan_to_num() for bucket in buckets]
    return results + [
        residual
        for state in ranks.states
        for entries in state.entries.values()
        for residual in entries.values()
    ]


def _guarded_steps(name: str) -> int:
    compared = 0
    with computing_with("native"), torch.no_grad():
        for dtype, world_size in ((torch.float32, 3), (torch.float64, 1), (torch.float16, 3)):
            expected = _steps(name, dtype, world_size)
            for at_end in (False, True):
                with Guarded(at_end=at_end):
                    results = _steps(name, dtype, world_size)
                assert len(results) == len(expected) and all(map(same_bits, results, expected)), (
                    dtype,
                    world_size,
                )
                compared += len(results)
    return compared


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tables_of_a_step_point_to_its_tensors(run_ranks: Any, name: str) -> None:
    """Results do not depend on where the tensors lie, and no pointer leads out of them."""
    (compared,) = run_ranks(_guarded_steps, name, world_size=1, init=False)
    assert compared > 50
