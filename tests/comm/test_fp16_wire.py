"""fp16 on the wire under a GradScaler's first scale: clamped and fed back, never an overflow of the hook's own."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.kernels import computing_with
from tests.support.models import (
    SHAPES,
    Gradients,
    all_finite,
    backward,
    masks,
    mlp,
    random_gradients,
    worst_error,
    wrap,
)

SCALE, STEPS, FP16_MAX = 65536.0, 50, 65504.0


def _train(bucket_cap_mb: float) -> dict[str, Any]:
    torch.manual_seed(0)
    # Without biases: those travel uncompressed, and beyond fp16's range they overflow as in plain fp16 compression.
    ddp = DistributedDataParallel(mlp(32, 3, bias=False), bucket_cap_mb=bucket_cap_mb)
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0}
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options, wrapper="fp16")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    teacher = torch.randn(32, 32, generator=torch.Generator().manual_seed(99))
    losses, largest, finite = [], 0.0, True
    for _ in range(STEPS):
        inputs = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(inputs) - torch.tanh(inputs @ teacher)).square().sum() / 16
        (loss * SCALE).backward()
        finite &= all_finite(p.grad for p in ddp.parameters())
        largest = max(largest, max(float(p.grad.norm()) for p in ddp.parameters()))
        for p in ddp.parameters():
            p.grad.div_(SCALE)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "largest": largest, "finite": finite, "stats": hook.stats()}


def test_scaled_gradients_stay_finite_and_train(run_ranks):
    for each in run_ranks(_train, 0.001):
        assert each["finite"]
        assert each["stats"]["nonfinite_steps"] == 0
        assert each["stats"]["compressed_steps"] == STEPS
        assert each["largest"] > 4 * FP16_MAX, "the case is about numbers that fp16 cannot hold"
        assert each["stats"]["bytes_sent"] < each["stats"]["bytes_uncompressed"] / 6
        assert sum(each["losses"][-10:]) < 0.7 * sum(each["losses"][:10])


def _prescribed(scale: float, wrapper: str | None) -> list[Gradients]:
    ddp = wrap(SHAPES)
    config = commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0, min_compression_rate=1)
    commhooks.attach(ddp, config, wrapper=wrapper)
    gradients = []
    for step in range(5):
        scaled = {name: g * scale for name, g in random_gradients(SHAPES, dist.get_rank(), step).items()}
        gradients.append({name: g / scale for name, g in backward(ddp, scaled).items()})
    return gradients


def _two_scales(scale: float, masked: bool, kernel: str) -> tuple[list[Gradients], list[Gradients]]:
    with masks(masked), computing_with(kernel):
        return _prescribed(scale, "fp16"), _prescribed(1.0, None)


@pytest.mark.parametrize(
    ("scale", "masked", "kernel"),
    [(1e-3, False, "native"), (300.0, False, "torch"), (1e-3, True, "torch"), (300.0, True, "torch")],
)
def test_what_travels_grows_with_the_gradient_not_with_its_square(run_ranks, scale, masked, kernel):
    """P and Q of gradients of this size fit into fp16; their squares would be clamped, or rounded to zero."""
    for fp16, float32 in run_ranks(_two_scales, scale, masked, kernel):
        for got, expected in zip(fp16, float32, strict=True):
            assert worst_error(got, expected) < 0.02
