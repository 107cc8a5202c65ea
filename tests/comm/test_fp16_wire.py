"""PowerSGD in fp16 on the wire. Gradients that fp16 cannot hold: test_hard_gradients.py."""

import pytest
import torch.distributed as dist

import commhooks
from tests.support.kernels import computing_with
from tests.support.models import (
    SHAPES,
    Gradients,
    backward,
    masks,
    random_gradients,
    worst_error,
    wrap,
)


def _prescribed(scale: float, wrapper: str | None) -> list[Gradients]:
    ddp = wrap(SHAPES)
    config = commhooks.PowerSGD(
        matrix_approximation_rank=2, start_powerSGD_iter=0, min_compression_rate=1
    )
    commhooks.attach(ddp, config, wrapper=wrapper)
    gradients = []
    for step in range(3):
        scaled = {
            name: g * scale for name, g in random_gradients(SHAPES, dist.get_rank(), step).items()
        }
        gradients.append({name: g / scale for name, g in backward(ddp, scaled).items()})
    return gradients


def _two_scales(scale: float, masked: bool, kernel: str) -> tuple[list[Gradients], list[Gradients]]:
    with masks(masked), computing_with(kernel):
        return _prescribed(scale, "fp16"), _prescribed(1.0, None)


@pytest.mark.parametrize(
    ("scale", "masked", "kernel"),
    [(1e-3, False, "native"), (300.0, False, "torch"), (300.0, True, "torch")],
)
def test_what_travels_grows_with_the_gradient_not_with_its_square(run_ranks, scale, masked, kernel):
    """P and Q of such gradients fit into fp16; their squares would be clamped or become zero."""
    for fp16, float32 in run_ranks(_two_scales, scale, masked, kernel):
        for got, expected in zip(fp16, float32, strict=True):
            assert worst_error(got, expected) < 0.02
