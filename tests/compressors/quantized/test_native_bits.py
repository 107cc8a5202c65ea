"""The native kernel of the quantised hooks computes the same bits as torch on any machine."""

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks import HookConfig, Int4Compress, Int8Compress
from commhooks.compressors.native import library
from commhooks.compressors.quantized.kernels import NativeKernel, TorchKernel, results_of
from commhooks.registry import compressor_of
from commhooks.testing import simulated_ranks
from tests.support.compilers import another_library, needs_compiler
from tests.support.kernels import computing_with
from tests.support.models import same_bits
from tests.support.simulation import SimulatedRanks

BLOCK = 32
# Parts of a block, one block, a little more, blocks for some of the ranks only, and more than a
# part of the kernel.
SHAPES = {
    "part": (1, BLOCK - 1),
    "whole": (BLOCK, 1),
    "vector": (7,),  # what follows in the bucket is not aligned
    "more": (1, BLOCK + 1),
    "many": (11, 113),
    "one": (1, 1),
    "idle": (5, 80),
    "long": (1, 150_001),
}
SIZES = torch.tensor([1e-3, 1e-2, 0.1, 1, 10], dtype=torch.float64)
CONFIGS: list[type[HookConfig]] = [Int8Compress, Int4Compress]
CASES = [
    (Int8Compress, torch.float32, 1),
    (Int8Compress, torch.float64, 3),
    (Int8Compress, torch.bfloat16, 3),
]
CASES += [(Int4Compress, torch.float32, 7), (Int4Compress, torch.float16, 2)]
pytestmark = needs_compiler


def _ranks(config: HookConfig, world_size: int, dtype: torch.dtype) -> SimulatedRanks:
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    return SimulatedRanks(lambda: compressor_of(config)(config), world_size, parameters)


def _gradients(ranks: SimulatedRanks, world_size: int, step: int) -> list[torch.Tensor]:
    """Return numbers of very different size, with zeros, denormal numbers and missing gradients."""
    generator = torch.Generator().manual_seed(step)
    layout = ranks.layout
    info = torch.finfo(layout.dtype)
    # In float16 the sum with a residual may be larger than any gradient; in wider ones it would be
    # inf.
    huge = info.max if layout.dtype == torch.float16 else info.max / 100
    buckets = []
    for rank in range(world_size):
        bucket = torch.randn(layout.numel, generator=generator, dtype=torch.float64)
        # No torch.pow: its bits depend on the number of threads.
        bucket *= SIZES[torch.randint(len(SIZES), (layout.numel,), generator=generator)]
        bucket[torch.rand(layout.numel, generator=generator) < 0.2] *= 0  # of both signs
        bucket = bucket.to(layout.dtype)
        for slot in layout.slots:
            gradient = slot.of(bucket)
            if slot.name == "many":
                gradient[:BLOCK] = -0.0
                gradient[BLOCK : 2 * BLOCK] *= info.tiny
                gradient[2 * BLOCK : 3 * BLOCK].clamp_(-1, 1).mul_(huge)
                gradient[3 * BLOCK] = min(1e30, huge)
            if slot.name == "idle" and (step == 2 or rank == 1):
                gradient.zero_()
        buckets.append(bucket)
    return buckets


def _run(
    config: HookConfig, world_size: int, dtype: torch.dtype, kernel: str = "native", steps: int = 4
) -> list[tuple[torch.Tensor, ...]]:
    """After each step the verdict, and per rank the average and the residuals. One step is not
    finite, and one has another loss scale.
    """
    with computing_with(kernel):
        ranks = _ranks(config, world_size, dtype)
    results = []
    with torch.no_grad():
        for step in range(steps):
            buckets = _gradients(ranks, world_size, step)
            if step == 1:
                buckets[-1][100] = float("nan")
            with _residual_factor(0.7 if step == 2 else 1.0):
                good = ranks.step(buckets)
            assert good == (step != 1)
            assert isinstance(
                ranks._works[0]._kernel, NativeKernel if kernel == "native" else TorchKernel
            )
            residuals = [state["residual"] for state in ranks.states] if _keeps(config) else []
            kept = [residual.clone() for of_rank in residuals for residual in of_rank.values()]
            # A NaN is a NaN, whichever its sign.
            results.append(
                (
                    torch.tensor(good),
                    *(torch.where(bucket.isnan(), torch.nan, bucket) for bucket in buckets),
                    *kept,
                )
            )
    return results


@contextmanager
def _residual_factor(factor: float) -> Iterator[None]:
    """The loss scale has changed."""
    real = simulated_ranks.StepInfo
    with mock.patch.object(
        simulated_ranks,
        "StepInfo",
        lambda *args, **more: real(*args, **more, residual_factor=factor),
    ):
        yield


def _keeps(config: HookConfig) -> bool:
    return bool(config.use_error_feedback)  # type: ignore[attr-defined]


def _compare(config: type[HookConfig], world_size: int, dtype: torch.dtype, **options: Any) -> None:
    options = {"block_size": BLOCK, **options}
    native, torch_form = (
        _run(config(**options), world_size, dtype, kernel) for kernel in ("native", "torch")
    )
    for step, (one, other) in enumerate(zip(native, torch_form, strict=True)):
        assert len(one) == len(other) and all(map(same_bits, one, other)), step
        assert (
            world_size == 1
            or options.get("use_error_feedback") is False
            or len(one) > 2 * world_size
        )


@pytest.mark.parametrize(("config", "dtype", "world_size"), CASES)
def test_the_bits_are_those_of_torch(
    config: type[HookConfig], dtype: torch.dtype, world_size: int
) -> None:
    _compare(config, world_size, dtype)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (Int8Compress, {"use_error_feedback": False}),
        (Int8Compress, {"block_size": 2**16}),
        (Int4Compress, {"use_error_feedback": False, "block_size": 16}),
    ],
)
def test_the_bits_are_those_of_torch_with_other_options(
    config: type[HookConfig], options: dict[str, Any]
) -> None:
    _compare(config, 2, torch.float32, **options)


def _build() -> str:
    return library.build(torch.device("cpu"), results_of)


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86_64")
CLANG = pytest.mark.skipif(shutil.which("clang") is None, reason="needs clang")


@pytest.mark.parametrize(
    ("compiler", "flags"),
    [
        pytest.param(None, "-mno-avx512f -O1", marks=X86),
        pytest.param(None, "-mno-avx -O1", marks=X86),
        pytest.param(None, "-O0"),
        pytest.param("clang", "-O3", marks=CLANG),
    ],
)
def test_the_bits_depend_neither_on_vectors_nor_on_the_compiler(
    compiler: str | None, flags: str
) -> None:
    """So machines of different kinds share the kernel."""
    usual = _build()
    with another_library(*flags.split(), compiler=compiler):
        assert _build() == usual
        for config in CONFIGS:
            _compare(config, 2, torch.float32)


@X86
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs a processor that joins them"
)
def test_a_build_that_joins_operations_is_another_build() -> None:
    usual = _build()
    # -O3 takes four times as long
    with another_library("-O1", "-fexpensive-optimizations", "-ffp-contract=fast"):
        assert _build() != usual


def test_no_bit_depends_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            results.append(
                [
                    tensor
                    for step in _run(Int4Compress(block_size=BLOCK), 2, torch.float32)
                    for tensor in step
                ]
            )
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(a, b) and same_bits(a, c) for a, b, c in zip(*results, strict=True))
