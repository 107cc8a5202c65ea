"""The residual follows a GradScaler, so that a changed scale changes no unscaled gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import process_group_of_one
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    Gradients,
    Prescribed,
    all_finite,
    backward,
    bits_equal,
    random_gradients,
    wrap,
)

STEPS = 12
# As a GradScaler does it: twice the scale now and then, half of it after an overflow (step 6, on
# rank 1).
SCALES = [
    1.0,
    1.0,
    2.0**16,
    2.0**16,
    2.0**17,
    2.0**17,
    2.0**18,
    2.0**17,
    2.0**16,
    2.0**-3,
    2.0**-3,
    1.0,
]
OVERFLOW = 6


def _run(scales: list[float], cap: float, quiet: int) -> tuple[list[Gradients], dict[str, Any]]:
    """Unscaled gradients of all steps. In step `quiet` one layer has none."""
    ddp = wrap(SHAPES, cap)
    scale = [1.0]
    config = commhooks.PowerSGD(
        matrix_approximation_rank=2, start_powerSGD_iter=1, min_compression_rate=1
    )
    hook = commhooks.attach(ddp, config, loss_scale=lambda: scale[0])
    unscaled = []
    for step, scale[0] in enumerate(scales):
        gradients = random_gradients(SHAPES, dist.get_rank(), step)
        if step == quiet:
            gradients["second"].zero_()
        if step == OVERFLOW and dist.get_rank() == 1:
            gradients["first"][0, 0] = float("inf")
        got = backward(ddp, {name: g * scale[0] for name, g in gradients.items()})
        unscaled.append({name: g / scale[0] for name, g in got.items()})
    return unscaled, hook.stats()


def _with_and_without(cap: float, quiet: int) -> Any:
    return _run(SCALES, cap, quiet), _run([1.0] * STEPS, cap, quiet)


@pytest.mark.parametrize(
    ("cap", "quiet"), [(25, 4), (EVERY_PARAMETER, 8)]
)  # quiet where the scale changes
def test_a_changing_scale_changes_nothing(run_ranks, cap, quiet):
    """Not a bit of it, because the scales are powers of two, as a GradScaler's are by default."""
    for (scaled, stats), (expected, _) in run_ranks(_with_and_without, cap, quiet):
        assert stats["nonfinite_steps"] == 1 and stats["compressed_steps"] == STEPS - 2
        for step in range(STEPS):
            if step == OVERFLOW:
                assert not all_finite(scaled[step].values())
                continue
            if step == quiet:
                assert (
                    not scaled[step].pop("second").any() and not expected[step].pop("second").any()
                )
            assert bits_equal(scaled[step], expected[step]), step


class Partly(Prescribed):
    """Uses the parameters only whose gradients it is called with."""

    def forward(self, gradients: Gradients) -> torch.Tensor:
        return torch.stack(
            [(p * gradients[n]).sum() for n, p in self.named_parameters() if n in gradients]
        ).sum()


@pytest.mark.parametrize("batched", [False, True])
def test_buckets_that_ddp_leaves_out_follow_the_scale(batched: bool) -> None:
    """Change the scale while a bucket is left out, in a good step and in a bad one."""

    def run(scales: list[float]) -> list[Gradients]:
        ddp = DistributedDataParallel(
            Partly(SHAPES),
            bucket_cap_mb=EVERY_PARAMETER,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
        )
        config = commhooks.BatchedPowerSGD if batched else commhooks.PowerSGD
        scale = [1.0]
        hook = commhooks.attach(ddp, config(start_powerSGD_iter=1), loss_scale=lambda: scale[0])
        unscaled = []
        for step, scale[0] in enumerate(scales):
            left_out = {"wide", "wide_bias"} if step in (4, 5, OVERFLOW, 9) else set()
            gradients = {
                n: g for n, g in random_gradients(SHAPES, 0, step).items() if n not in left_out
            }
            if step == OVERFLOW:
                gradients["first"][0, 0] = float("inf")
            ddp.zero_grad(set_to_none=True)
            ddp({name: g * scale[0] for name, g in gradients.items()}).backward()
            unscaled.append(
                {
                    n: p.grad / scale[0]
                    for n, p in ddp.module.named_parameters()
                    if p.grad is not None
                }
            )
            assert unscaled[-1].keys() == gradients.keys()
        assert (
            hook.stats()["nonfinite_steps"] == 1 and hook.stats()["compressed_steps"] == STEPS - 2
        )
        return unscaled

    with process_group_of_one():
        for step, (scaled, expected) in enumerate(
            zip(run(SCALES), run([1.0] * STEPS), strict=True)
        ):
            assert step == OVERFLOW or bits_equal(scaled, expected), step


NOT_POSITIVE = "a positive number. A GradScaler comes down to zero when every"
NO_NUMBER = "the factor by which the loss was multiplied: a number"


@pytest.mark.parametrize(
    ("scale", "text"),
    [(scale, NOT_POSITIVE) for scale in (0.0, -1.0, float("inf"), float("nan"))]
    + [(scale, NO_NUMBER) for scale in (None, "2", torch.ones(2))],
)
def test_a_value_that_is_no_scale_is_refused(scale: Any, text: str) -> None:
    with process_group_of_one():
        ddp = wrap(SHAPES)
        commhooks.attach(
            ddp, "powerSGD", hook_options={"start_powerSGD_iter": 0}, loss_scale=lambda: scale
        )
        with pytest.raises(commhooks.HookRunError, match=text):
            backward(ddp, random_gradients(SHAPES, 0, 0))
