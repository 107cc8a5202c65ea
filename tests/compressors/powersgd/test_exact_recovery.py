"""If the mean gradient has no higher rank than the approximation, nothing is lost, whatever the ranks differ by."""

import itertools

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests.support.models import EVERY_PARAMETER, Gradients, backward, worst_error, wrap

SHAPES = {"a": (20, 30), "b": (20, 30), "c": (20, 30), "wide": (12, 50), "tall": (50, 12), "bias": (20,)}
TOLERANCE = {torch.float32: 2e-5, torch.float64: 5e-14}


def _gradients(true_rank: int, rank: int, world_size: int, dtype: torch.dtype) -> tuple[Gradients, Gradients]:
    """(gradients of this rank, their mean over ranks)."""
    generator = torch.Generator().manual_seed(true_rank)
    own, mean = {}, {}
    for name, shape in SHAPES.items():
        if len(shape) == 1:
            mean[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            left = torch.randn(shape[0], true_rank, generator=generator, dtype=torch.float64)
            mean[name] = left @ torch.randn(true_rank, shape[1], generator=generator, dtype=torch.float64)
        # Differences of full rank between the ranks that cancel in the mean.
        noise = torch.randn(world_size, *shape, generator=generator, dtype=torch.float64)
        own[name] = (mean[name] + noise[rank] - noise.mean(0)).to(dtype)
    return own, mean


def _worst_errors(cases: list[tuple[int, int, float, torch.dtype]]) -> list[float]:
    errors = []
    for approximation_rank, true_rank, cap, dtype in cases:
        ddp = wrap(SHAPES, cap, dtype)
        config = commhooks.PowerSGD(
            matrix_approximation_rank=approximation_rank, start_powerSGD_iter=0, min_compression_rate=1
        )
        hook = commhooks.attach(ddp, config)
        own, mean = _gradients(true_rank, dist.get_rank(), dist.get_world_size(), dtype)
        errors.append(max(worst_error(backward(ddp, own), mean) for _ in range(3)))
        assert len(hook.plan().compressed) == len(SHAPES) - 1
    return errors


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_low_rank_gradients_are_recovered(run_ranks, world_size):
    cases = [
        (approximation_rank, true_rank, cap, dtype)
        for approximation_rank, true_rank in [(1, 1), (2, 1), (2, 2), (4, 3), (4, 4)]
        for cap, dtype in itertools.product([25, EVERY_PARAMETER], TOLERANCE)
    ]
    for errors in run_ranks(_worst_errors, cases, world_size=world_size):
        for case, error in zip(cases, errors, strict=True):
            assert error < TOLERANCE[case[-1]], case
