"""One bucket as a quantised all-reduce with error feedback.

    delta = gradient + residual
    the mean of delta over the ranks, quantised on the way, is the averaged gradient (`mean.py`)
    what rounding lost on this rank is its new residual

The server's error feedback in the owner's residual is that of DoubleSqueeze (Tang, Yu, Lian, Zhang, Liu: ICML 2019).
"""

from collections.abc import Iterator
from typing import Any

import torch

from commhooks.comm.wire import put_plain
from commhooks.compressors.base import Exchange, State, StepInfo, Verdict
from commhooks.compressors.quantized.gradient_blocks import put_flags
from commhooks.compressors.quantized.workspace import NativeWorkspace, Workspace


def quantised_exchange(flat: torch.Tensor, work: Workspace | NativeWorkspace, state: State, step: StepInfo) -> Exchange:
    """One bucket of one backward pass. Works on any device; on an accelerator the host never waits for it. The bits do
    not depend on whether the workspace computes with torch or with the native kernel.

    What is not finite arrives as NaN on every rank. A parameter without a gradient on any rank keeps its residual, and
    its averaged gradient is zero.

    Args:
        flat: the bucket's buffer, 1-D: this rank's gradient, replaced by the average.
        work: the workspace of the bucket's layout.
        state: "residual" per parameter, flat in memory order; written after the verdict.
        step: the step of this backward pass.
    """
    gradients: Any = work.gradients  # each kind of workspace has its own kind of gradients and mean
    mean: Any = work.mean(step.world_size)
    residuals = state["residual"]
    put_flags(gradients.slots, flat, mean.flags)
    gradients.form_delta(flat, residuals, step.residual_factor)
    for at, gradient in _plain(flat, work):
        put_plain(gradient, mean.plain[at : at + len(gradient)], step.world_size)

    averaged = yield from mean.over_ranks(work.delta, step.rank, torch.finfo(flat.dtype).max)

    good = yield Verdict(averaged.finite)
    gradients.commit(averaged, flat, residuals, step.residual_factor, good)
    for at, gradient in _plain(flat, work):
        gradient.copy_(averaged.plain[at : at + len(gradient)])
    return None


def _plain(flat: torch.Tensor, work: Workspace | NativeWorkspace) -> Iterator[tuple[int, torch.Tensor]]:
    """The uncompressed parts of the bucket, each with its offset if they lie one after another."""
    at = 0
    for slot in work.plain:
        yield at, slot.of(flat)
        at += slot.numel
