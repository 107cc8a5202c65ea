"""How long the codec of a plan takes for one step on this machine: the exchange itself, on random numbers, in one
process and without a network."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.base import Compressor
from commhooks.compressors.plan import UnitPlan
from commhooks.engine.loopback import Loopback

SAMPLE_NUMEL = 2**25
"""At most so many numbers are computed with; what a larger model takes is scaled up from them."""
BUCKET_NUMEL = 2**23
"""Numbers in a bucket, about as in DDP."""
ROUNDS = 5


@dataclass(frozen=True)
class CodecTime:
    """Seconds per step, and how they were measured."""

    seconds: float
    device: str
    threads: int
    """Of the CPU."""
    share: float
    """Part of the numbers that was computed with, 0 to 1."""


def measure_codec(compressor: Compressor[Any], plans: Sequence[UnitPlan], device: torch.device) -> CodecTime:
    """Run what one step of `plans` computes, on parameters of their shapes.

    Raises:
        HookConfigError: this machine cannot run the compressor on `device`.
    """
    for dtype in {plan.dtype for plan in plans}:
        compressor.check_here(device, dtype)
    rows = [plan for plan in plans if compressor.computes(plan)]
    total = sum(plan.numel for plan in rows)
    # Every so many of them, by size: small matrices take longer for each number, and have to be among them.
    stride = -(-total // SAMPLE_NUMEL)
    chosen = sorted(rows, key=lambda plan: plan.numel, reverse=True)[stride // 2 :: stride] if total else []
    left, sampled = SAMPLE_NUMEL, 0
    buckets: list[list[torch.Tensor]] = [[]]
    for plan in chosen or rows[:1]:
        if left <= 0:
            break
        shape = _shortened(plan.shape, left)
        # Only shape and dtype are read of it. A complex gradient travels as pairs of real numbers.
        dtype = plan.dtype.to_real() if plan.dtype.is_complex else plan.dtype
        sample = torch.empty(shape, dtype=dtype, device="meta")
        if sum(each.numel() for each in buckets[-1]) + sample.numel() > BUCKET_NUMEL and buckets[-1]:
            buckets.append([])
        if buckets[-1] and buckets[-1][-1].dtype != sample.dtype:
            buckets.append([])
        buckets[-1].append(sample)
        left -= sample.numel()
        sampled += sample.numel()
    if not sampled:
        return CodecTime(0.0, device.type, torch.get_num_threads(), 1.0)
    loopback = Loopback(compressor, buckets, device)

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
    seconds = min(once() for _ in range(ROUNDS))  # the others say what else the machine was doing
    return CodecTime(seconds * total / sampled, device.type, torch.get_num_threads(), min(1.0, sampled / total))


def _shortened(shape: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """`shape` with fewer rows where it has more than `numel` elements."""
    if not shape:
        return shape
    row = max(1, torch.Size(shape[1:]).numel())
    return (max(1, min(shape[0], numel // row)), *shape[1:])
