"""Measure how long the codec of a plan takes for one step on this machine: runs the exchange on random numbers, in one
process and without a network."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.base import Compressor
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
    device: str
    threads: int
    """Number of CPU threads."""
    share: float
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
    rows = [plan for plan in plans if compressor.computes(plan)]
    total = sum(plan.numel for plan in rows)
    # Sample the parameters evenly by size: small matrices take longer per element and must be represented.
    stride = -(-total // SAMPLE_NUMEL)
    chosen = sorted(rows, key=lambda plan: plan.numel, reverse=True)[stride // 2 :: stride] if total else []
    left, sampled = SAMPLE_NUMEL, 0
    buckets: list[dict[str, torch.Tensor]] = [{}]
    for plan in chosen or rows[:1]:
        if left <= 0:
            break
        shape = _shortened(plan.shape, left)
        # Only its shape and dtype are read. A complex gradient is sent as pairs of real numbers.
        dtype = plan.dtype.to_real() if plan.dtype.is_complex else plan.dtype
        sample = torch.empty(shape, dtype=dtype, device="meta")
        others = list(buckets[-1].values())
        full = sum(each.numel() for each in others) + sample.numel() > BUCKET_NUMEL
        if others and (full or others[-1].dtype != sample.dtype):
            buckets.append({})
        buckets[-1][plan.name] = sample
        left -= sample.numel()
        sampled += sample.numel()
    if not sampled:
        return CodecTime(0.0, device.type, torch.get_num_threads(), 1.0)
    loopback = LocalDriver(compressor, buckets, device)

    def once() -> float:
        loopback.fill()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        loopback.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    seconds = min(once() for _ in range(ROUNDS))  # the minimum is disturbed least by other load
    return CodecTime(
        seconds * total / sampled,
        device.type,
        torch.get_num_threads(),
        min(1.0, sampled / total),
        loopback.choice.kernel.name,
        loopback.choice.slower,
    )


def _shortened(shape: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """`shape`, with fewer rows if it has more than `numel` elements."""
    if not shape:
        return shape
    row = max(1, torch.Size(shape[1:]).numel())
    return (max(1, min(shape[0], numel // row)), *shape[1:])
