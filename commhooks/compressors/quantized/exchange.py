"""One bucket as a quantised all-reduce with error feedback.

    delta = gradient + residual
    the mean of delta over the ranks, quantised on the way, is the averaged gradient (`mean.py`)
    what rounding lost on this rank is its new residual

The server's error feedback in the owner's residual is that of DoubleSqueeze (Tang, Yu, Lian, Zhang, Liu: ICML 2019).
"""

from collections.abc import Iterator

import torch

from commhooks.comm.wire import put_plain
from commhooks.compressors.base import Exchange, State, StepInfo, Verdict
from commhooks.compressors.quantized.workspace import Workspace


def quantised_exchange(flat: torch.Tensor, work: Workspace, state: State, step: StepInfo) -> Exchange:
    """One bucket of one backward pass. Works on any device; on an accelerator the host never waits for it.

    What is not finite arrives as NaN on every rank. A parameter without a gradient on any rank keeps its residual, and
    its averaged gradient is zero.

    Args:
        flat: the bucket's buffer, 1-D: this rank's gradient, replaced by the average.
        work: the workspace of the bucket's layout.
        state: "residual" per parameter, flat in memory order; written after the verdict.
        step: the step of this backward pass.
    """
    gradients, mean, residuals = work.gradients, work.mean(step.world_size), state["residual"]
    gradients.form_delta(flat, residuals, step.residual_factor)
    gradients.put_flags(flat, mean.flags)
    for at, gradient in _plain(flat, work):
        put_plain(gradient, mean.plain[at : at + len(gradient)], step.world_size)

    averaged = yield from mean.over_ranks(work.delta, step.rank, torch.finfo(flat.dtype).max)

    good = yield Verdict(averaged.finite)
    used = gradients.used(averaged.flags)
    gradients.keep_lost(residuals, step.residual_factor, good, used)
    gradients.write(averaged.decode(gradients.delta), used, flat)
    for at, gradient in _plain(flat, work):
        gradient.copy_(averaged.plain[at : at + len(gradient)])
    return None


def _plain(flat: torch.Tensor, work: Workspace) -> Iterator[tuple[int, torch.Tensor]]:
    """The uncompressed parts of the bucket, each with its offset if they lie one after another."""
    at = 0
    for slot in work.plain:
        yield at, slot.of(flat)
        at += slot.numel
