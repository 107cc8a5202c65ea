"""One matrix of cases over everything that selects another path. What must hold in each of them:

replicas equal bit for bit, steps counted, bytes saved, and nothing lost: with error feedback, what a step does not put
into the gradient is in the residuals, up to the rounding of the wire.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests.support.ddp_steps import conservation_error, residuals
from tests.support.kernels import computing_with
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    all_finite,
    backward,
    bits_equal,
    random_gradients,
    wrap,
)

COMPRESSED_STEPS = 3
# |mean residual + gradient - mean delta| / |mean delta|, by what travels.
LOST = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 3e-3}


class Case(NamedTuple):
    error_feedback: bool
    warm_start: bool
    bucket_cap_mb: float
    start: int


CASES = [
    Case(True, True, 25, 3),
    Case(True, True, EVERY_PARAMETER, 0),
    Case(True, False, 25, 0),
    Case(True, False, EVERY_PARAMETER, 1),
    Case(False, True, EVERY_PARAMETER, 1),
    Case(False, False, 25, 0),
]


def _run(case: Case, dtype: torch.dtype, wrapper: str | None, kernel: str = "native") -> dict[str, Any]:
    ddp = wrap(SHAPES, case.bucket_cap_mb, dtype)
    config = commhooks.PowerSGD(
        matrix_approximation_rank=2,
        start_powerSGD_iter=case.start,
        min_compression_rate=1,
        use_error_feedback=case.error_feedback,
        warm_start=case.warm_start,
    )
    with computing_with(kernel):
        hook = commhooks.attach(ddp, config, wrapper=wrapper)
    got, lost = [], []
    for step in range(case.start + COMPRESSED_STEPS):
        own = random_gradients(SHAPES, dist.get_rank(), step, dtype)
        before = residuals(hook)
        got.append(backward(ddp, own))
        after = residuals(hook)
        if step >= case.start and case.error_feedback:
            for name in (plan.name for plan in hook.plan().compressed):
                lost.append(conservation_error(own[name], before.get(name), after[name], got[-1][name]))
    return {"gradients": got, "lost": lost, "stats": hook.stats(), "residuals": len(residuals(hook))}


def _run_all(dtype: torch.dtype, wrapper: str | None, kernel: str) -> list[dict[str, Any]]:
    return [_run(case, dtype, wrapper, kernel) for case in CASES]


@pytest.mark.parametrize(
    ("dtype", "wrapper", "wire", "kernel"),
    [
        (torch.float32, None, torch.float32, "native"),
        (torch.float32, "fp16", torch.float16, "native"),
        (torch.float32, "fp16", torch.float16, "torch"),
        (torch.float32, "bf16", torch.bfloat16, "torch"),
        (torch.bfloat16, "fp16", torch.bfloat16, "native"),  # a 16-bit bucket is not converted to the other 16-bit type
    ],
)
def test_every_case(run_ranks, dtype, wrapper, wire, kernel):
    for case, *ranks in zip(CASES, *run_ranks(_run_all, dtype, wrapper, kernel), strict=True):
        for each in ranks:
            assert all(map(bits_equal, each["gradients"], ranks[0]["gradients"])), case
            assert all_finite(g for gradients in each["gradients"] for g in gradients.values()), case
            stats = each["stats"]
            steps = case.start + COMPRESSED_STEPS
            assert (stats["step"], stats["compressed_steps"]) == (steps, COMPRESSED_STEPS), case
            assert stats["nonfinite_steps"] == 0, case
            # 0.273 of the elements travel, and a flag for each of the 4 matrices.
            uncompressed = stats["bytes_uncompressed"] / steps
            assert stats["bytes_sent_last_pass"] < 0.28 * uncompressed * wire.itemsize / dtype.itemsize, case
            assert each["residuals"] == (4 if case.error_feedback else 0), case
            assert len(each["lost"]) == (4 * COMPRESSED_STEPS if case.error_feedback else 0)
            assert all(lost <= LOST[wire] for lost in each["lost"]), (case, max(each["lost"]))


def _lost_on_one_rank(wrapper: str) -> list[float]:
    return [lost for case in CASES if case.error_feedback for lost in _run(case, torch.float32, wrapper)["lost"]]


@pytest.mark.parametrize("wrapper", ["fp16", "bf16"])
def test_rounding_for_the_wire_is_fed_back(run_ranks, wrapper):
    """What the ranks lose above is rounding in the reduction. On one rank there is none, so nothing may be lost."""
    [lost] = run_ranks(_lost_on_one_rank, wrapper, world_size=1)
    assert max(lost) <= LOST[torch.float32]
