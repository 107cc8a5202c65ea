"""Error feedback lets gradient descent arrive where rounding alone holds it up."""

import pytest
import torch

from commhooks import HookConfig, Int4Compress, Int8Compress
from commhooks.compressors.registry import compressor_of
from commhooks.engine.simulation import SimulatedRanks

WORLD_SIZE, SHAPE, BLOCK = 3, (8, 16), 128


def _distance(config: HookConfig) -> float:
    """The error that is left after 250 steps on a quadratic whose curvature differs by a factor of 30 in a block."""
    parameters = {"w": torch.zeros(SHAPE)}
    ranks = SimulatedRanks(lambda: compressor_of(config)(config), WORLD_SIZE, parameters)
    generator = torch.Generator().manual_seed(0)
    numel = parameters["w"].numel()
    curvature = torch.logspace(-1.5, 0, numel)
    # Each rank has a minimum of its own; their mean is zero.
    minima = torch.randn(WORLD_SIZE, numel, generator=generator)
    minima -= minima.mean(0)
    weight = torch.ones(numel)
    with torch.no_grad():
        for _ in range(250):
            buckets = [curvature * (weight - minimum) for minimum in minima]
            assert ranks.step(buckets)
            weight -= 0.9 * buckets[0]
    return float((curvature * weight.square()).sum().sqrt())


@pytest.mark.parametrize("config", [Int8Compress, Int4Compress])
def test_the_minimum_is_reached_with_error_feedback_only(config: type[Int8Compress] | type[Int4Compress]) -> None:
    with_feedback = _distance(config(block_size=BLOCK))
    without = _distance(config(block_size=BLOCK, use_error_feedback=False))
    assert without > 4 * with_feedback
