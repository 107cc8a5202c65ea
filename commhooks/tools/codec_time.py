"""Measure how long the codec of a plan takes for one step on this machine, on random numbers in one process."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.link import seconds_of
from commhooks.compressors.base import Compressor
from commhooks.compressors.local_steps.options import passes_per_exchange
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.local_driver import LocalDriver

SAMPLE_NUMEL = 2**25
"""The largest number of elements to measure with; the time of a larger model is extrapolated."""
BUCKET_NUMEL = 2**23
"""Elements per bucket, about as in DDP."""
ROUNDS = 5


@dataclass(frozen=True)
class CodecTime:
    """Seconds per step, and the conditions of the measurement."""

    seconds: float
    device: str = ""
    """Where it was measured; "" if it was not."""
    threads: int = 0
    """Number of CPU threads."""
    share: float = 1.0
    """Share of the elements that was measured, 0 to 1."""
    kernel: str = ""
    """Name of the kernel that computed; "" if nothing was measured."""
    missing: str = ""
    """Why this machine lacks a faster kernel; "" if it does not."""


def measure_codec(compressor: Compressor[Any], plans: Sequence[UnitPlan], device: torch.device) -> CodecTime:
    """Time the computation of one step on parameters with the shapes of `plans`.

    Raises:
        HookConfigError: this machine cannot run the compressor on `device`.
    """
    for dtype in {plan.dtype for plan in plans}:
        compressor.check_here(device, dtype)
    rows = [plan for plan in plans if plan.numel and compressor.computes(plan)]
    rows.sort(key=lambda plan: plan.numel, reverse=True)
    total = sum(plan.numel for plan in rows)
    buckets = _sample(rows, total)
    sampled = sum(each.numel() for bucket in buckets for each in bucket.values())
    if not sampled:
        return CodecTime(0.0, device.type, torch.get_num_threads())
    driver = LocalDriver(compressor, buckets, device)

    def once() -> float:
        driver.fill()
        return seconds_of(driver.step, device)

    once()
    seconds = min(once() for _ in range(ROUNDS))  # the minimum is disturbed least by other load
    kernel, share = driver.choice.kernel.name, min(1.0, sampled / total)
    per_step = seconds / passes_per_exchange(compressor.config)
    return CodecTime(
        per_step * total / sampled, device.type, torch.get_num_threads(), share, kernel, driver.choice.slower
    )


def _sample(rows: Sequence[UnitPlan], total: int) -> list[dict[str, torch.Tensor]]:
    """Buckets of parameters, chosen evenly by size: small matrices take longer per element and must be represented.

    Args:
        rows: the largest first.
        total: their elements.
    """
    stride, left = max(1, -(-total // SAMPLE_NUMEL)), SAMPLE_NUMEL
    buckets: list[dict[str, torch.Tensor]] = [{}]
    for plan in rows[stride // 2 :: stride] or rows[:1]:
        if left <= 0:
            break
        # One that is too large has fewer rows.
        limit = left // max(1, math.prod(plan.shape[1:]))
        shape = (max(1, min(plan.shape[0], limit)), *plan.shape[1:]) if plan.shape else ()
        # Only its shape and dtype are read. A complex gradient is sent as pairs of real numbers.
        sample = torch.empty(shape, dtype=plan.dtype.to_real(), device="meta")
        others = list(buckets[-1].values())
        full = sum(each.numel() for each in others) + sample.numel() > BUCKET_NUMEL
        if others and (full or others[-1].dtype != sample.dtype):
            buckets.append({})
        buckets[-1][plan.name] = sample
        left -= sample.numel()
    return buckets
