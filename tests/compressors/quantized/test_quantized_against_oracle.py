"""Averages and residuals of the quantised hooks equal those of plain loops."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from commhooks import Int4Compress, Int8Compress
from commhooks.registry import compressor_of
from tests.compressors.quantized.quantized_oracle import OracleRanks
from tests.support.kernels import computing_with
from tests.support.models import masks, same_bits
from tests.support.simulation import SimulatedRanks

BLOCK = 16
STEPS = 4
# Parts of a block, one block, a little more, and more than a block for each of many ranks.
SHAPES = {
    "part": (1, BLOCK - 1),
    "whole": (BLOCK, 1),
    "more": (1, BLOCK + 1),
    "vector": (9,),
    "many": (11, 13),
    "number": (),
    "one": (1, 1),
    "quiet": (5, 8),
}
CONFIGS = {"int8": Int8Compress, "int4": Int4Compress}
# the native kernel has the bits of torch: test_native_bits.py
WAYS = [
    "torch",
    "as on an accelerator",
]
LEVELS = {"int8": 127, "int4": 7}
COMPRESSED = ("part", "whole", "more", "many", "quiet")
QUIET_AT = 2
"""At this step no rank has a gradient for one parameter."""


def _parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def _gradients(rank: int, step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(100 * step + rank)
    gradients = {
        name: torch.randn(shape, generator=noise, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    if step == QUIET_AT:
        gradients["quiet"] = torch.zeros_like(gradients["quiet"])
    return {name: gradient.to(dtype) for name, gradient in gradients.items()}


def _simulated(hook: str, world_size: int, dtype: torch.dtype, way: str) -> SimulatedRanks:
    config = CONFIGS[hook](block_size=BLOCK)
    with computing_with("torch"):
        return SimulatedRanks(lambda: compressor_of(config)(config), world_size, _parameters(dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
@pytest.mark.parametrize("world_size", [1, 3, 9])
@pytest.mark.parametrize("hook", CONFIGS)
def test_averages_and_residuals_are_those_of_the_oracle(
    hook: str, world_size: int, dtype: torch.dtype, tolerance: float, way: str
) -> None:
    with masks(way == "as on an accelerator"), torch.no_grad():
        ranks = _simulated(hook, world_size, dtype, way)
        assert [plan.name for plan in ranks.plans if plan.compressed] == sorted(
            COMPRESSED, key=list(SHAPES).index
        )
        sizes = {name: torch.Size(SHAPES[name]).numel() for name in COMPRESSED}
        oracle = OracleRanks(world_size, LEVELS[hook], BLOCK, sizes)
        for step in range(STEPS):
            gradients = [_gradients(rank, step, dtype) for rank in range(world_size)]
            buckets = [parameters_to_vector(of_rank.values()) for of_rank in gradients]
            assert ranks.step(buckets)
            assert all(same_bits(bucket, buckets[0]) for bucket in buckets)
            plain = [
                {name: gradient.flatten().tolist() for name, gradient in of_rank.items()}
                for of_rank in gradients
            ]
            average = oracle.step(plain)
            expected = torch.tensor(sum(average.values(), []), dtype=torch.float64)
            torch.testing.assert_close(buckets[0].double(), expected, rtol=0, atol=10 * tolerance)
            for state, residual in zip(ranks.states, oracle.residuals, strict=True):
                _compare(state["residual"], residual, world_size * tolerance)


def _compare(
    got: dict[str, torch.Tensor], expected: dict[str, list[float]], tolerance: float
) -> None:
    assert got.keys() == expected.keys()
    for name, residual in got.items():
        should_be = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(residual.double(), should_be, rtol=0, atol=10 * tolerance)
