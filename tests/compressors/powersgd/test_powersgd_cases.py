"""Error feedback loses nothing: what a gradient lacks is in the residuals, on every path."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.comm.packing import WIRE_DTYPES, wire_dtype_of
from tests.support.ddp_steps import conservation_error, residuals
from tests.support.kernels import computing_with
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    Gradients,
    all_finite,
    backward,
    bits_equal,
    random_gradients,
    wrap,
)

STEPS = 3
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
    Case(True, False, EVERY_PARAMETER, 1),
    Case(False, True, 25, 1),
]


def _run(
    dtype: torch.dtype, wrapper: str | None, wire: torch.dtype, kernel: str
) -> list[tuple[list[Gradients], list[float]]]:
    """For each case the gradients, and what was lost of each matrix in each step."""
    assert wire_dtype_of(dtype, WIRE_DTYPES.get(wrapper or "")) == wire
    results = []
    for case in CASES:
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
        for step in range(case.start + STEPS):
            local = random_gradients(SHAPES, dist.get_rank(), step, dtype)
            before = residuals(hook)
            got.append(backward(ddp, local))
            after = residuals(hook)
            for name in after if step >= case.start else ():
                lost.append(
                    conservation_error(local[name], before.get(name), after[name], got[-1][name])
                )
        assert len(lost) == (4 * STEPS if case.error_feedback else 0), case
        stats = hook.stats()
        assert (stats["compressed_steps"], stats["nonfinite_steps"]) == (STEPS, 0), case
        # 0.273 of the elements travel, and a flag for each of the 4 matrices.
        plain = stats["bytes_uncompressed"] / (case.start + STEPS)
        assert stats["bytes_sent_last_pass"] < 0.28 * plain * wire.itemsize / dtype.itemsize, case
        results.append((got, lost))
    return results


@pytest.mark.parametrize(
    ("dtype", "wrapper", "wire", "kernel"),
    [
        (torch.float32, None, torch.float32, "native"),
        (torch.float32, "fp16", torch.float16, "native"),
        (torch.float32, "bf16", torch.bfloat16, "torch"),
        (
            torch.bfloat16,
            "fp16",
            torch.bfloat16,
            "native",
        ),  # a 16-bit bucket is not converted to the other 16-bit type
    ],
)
def test_nothing_is_lost(run_ranks, dtype, wrapper, wire, kernel):
    for case, *ranks in zip(CASES, *run_ranks(_run, dtype, wrapper, wire, kernel), strict=True):
        for gradients, lost in ranks:
            assert all(map(bits_equal, gradients, ranks[0][0])), case
            assert all_finite(g for of_rank in gradients for g in of_rank.values()), case
            assert max(lost, default=0) <= LOST[wire], case


@pytest.mark.parametrize(("wrapper", "wire"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounding_for_the_wire_is_fed_back(run_ranks, wrapper, wire):
    """What the ranks lose above is rounding in the reduction. On one rank there is none, so nothing
    may be lost.
    """
    [results] = run_ranks(_run, torch.float32, wrapper, wire, "native", world_size=1)
    assert max(loss for _, lost in results for loss in lost) <= LOST[torch.float32]
