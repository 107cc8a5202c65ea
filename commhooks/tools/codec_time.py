"""How long the codec of a plan takes for one step on this machine: measured on random numbers, by one process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.powersgd import codec, fused_codec
from commhooks.gradients import precision
from commhooks.hook.plan import ModelPlan, ParameterPlan

SAMPLE_NUMEL = 2**25
"""At most so many numbers are computed with; what a larger model takes is scaled up from them."""
ROUNDS = 5

Work = tuple[Callable[[], None], ...]
"""The passes over one matrix."""


@dataclass(frozen=True)
class CodecTime:
    """Seconds per step, and how they were found out."""

    seconds: float
    device: str
    threads: int
    """Of the CPU."""
    share: float
    """Part of the numbers that was computed with, 0 to 1."""


def measure_codec(plan: ModelPlan, device: torch.device, *, fused: bool = False) -> CodecTime:
    """Compute what one step of `plan` computes, on sample matrices of its shapes.

    Raises:
        HookConfigError: `fused` on a machine without a C compiler, or not on the CPU.
    """
    if fused:
        fused_codec.check_supported(device, torch.float32)
    products: Any = fused_codec.load() if fused else codec
    rows = list(plan.compressed) if plan.low_rank else [p for p in plan.parameters if plan.is_lowered(p)]
    total = sum(p.numel for p in rows)
    # Every so many of them, by size: small matrices take longer for each number, and have to be among them.
    stride = -(-total // SAMPLE_NUMEL)
    chosen = sorted(rows, key=lambda p: p.numel, reverse=True)[stride // 2 :: stride] if total else []
    left = SAMPLE_NUMEL
    sampled = 0
    works: list[Work] = []
    for p in chosen or rows[:1]:
        if left <= 0:
            break
        if plan.low_rank:
            n = max(p.rank, min(p.n, left // p.m))
            works.append(_low_rank(p, n, plan.error_feedback, products, device))
            numel = min(n * p.m, p.numel)
        else:
            numel = min(p.numel, left)
            assert plan.wire_dtype is not None
            works.append(_cast(numel, p.dtype, plan.wire_dtype, device))
        left -= numel
        sampled += numel
    if not works:
        return CodecTime(0.0, device.type, torch.get_num_threads(), 1.0)

    def once() -> float:
        began = time.perf_counter()
        # As in a step: one pass after the other over all of a bucket, which has left the cache by then.
        for place in range(len(works[0])):
            for work in works:
                work[place]()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    with precision.exact(device):
        once()
        seconds = min(once() for _ in range(ROUNDS))  # the others say what else the machine was doing
    return CodecTime(seconds * total / sampled, device.type, torch.get_num_threads(), sampled / total)


def _low_rank(p: ParameterPlan, n: int, error_feedback: bool, products: Any, device: torch.device) -> Work:
    dtype = precision.compute_dtype(p.dtype)
    delta = torch.randn(n, p.m, dtype=dtype, device=device)
    residual = torch.randn(n, p.m, dtype=dtype, device=device) if error_feedback else None
    factor_p = codec.new_factor(p.rank, n, dtype, device)
    factor_q = codec.new_factor(p.rank, p.m, dtype, device)
    factor_q[: p.rank] = torch.randn(p.rank, p.m, dtype=dtype, device=device)

    def make_p() -> None:
        products.add_and_project(delta, residual, 1.0, factor_q, p.rank, out=factor_p)

    def make_q() -> None:
        factor_p[: p.rank] = codec.orthonormal_rows(factor_p[: p.rank], None)[0]
        if not p.alternate:
            products.project_q(delta, factor_p, p.rank, out=factor_q)

    def split() -> None:
        if residual is not None:
            # The numbers stay of the same size over the rounds: what is added is what was left.
            products.split(delta, (factor_p, factor_q), (factor_p, factor_q), p.rank, residual)
        else:
            codec.reconstruct(factor_p, factor_q, p.rank, out=delta)
        factor_q.div_(torch.linalg.vector_norm(factor_q, dim=1, keepdim=True).clamp_(min=1e-30))

    return make_p, make_q, split


def _cast(numel: int, dtype: torch.dtype, wire: torch.dtype, device: torch.device) -> Work:
    gradient = torch.zeros(numel, dtype=dtype, device=device)

    def work() -> None:
        gradient.copy_(gradient.to(wire).div_(2))

    return (work,)
