"""PowerSGD for one bucket of one backward pass: Vogels, Karimireddy, Jaggi, NeurIPS 2019, Algorithms 1 and 2.

`reference.py` says the same in plain torch for one matrix, without any of what makes it fast; tests compare both.
"""

import functools
from typing import Protocol

import torch

from commhooks.comm.wire import all_finite, divide, put_plain
from commhooks.compressors.base import Exchange, Send, State, StepInfo, Verdict
from commhooks.compressors.error_feedback import clear_flags_of_unused
from commhooks.compressors.powersgd.workspace import Workspace


class BucketPass:
    """One bucket of one backward pass: what the kernels read and write.

    Args:
        flat: the bucket's buffer, 1-D, changed in place.
        state: "q" per matrix, `r x m`; "residual" per parameter, flat in memory order.

    Attributes:
        gradients: per matrix its part of the bucket, 1-D.
        plain: what is uncompressed in the bucket.
        first: the message of P, which also holds uncompressed gradients and flags.
        last: the message of Q.
        deltas: gradient + residual; set in `form_p`, in the form that the kernel works on.
        used, used_elements: masks of `DeviceKernel`: per matrix whether it has a gradient on some rank, and the same
            per element of a whole bucket.
    """

    deltas: list[torch.Tensor]
    used: torch.Tensor
    used_elements: torch.Tensor | None = None

    def __init__(self, flat: torch.Tensor, work: Workspace, state: State, step: StepInfo) -> None:
        self.flat, self.work, self.step = flat, work, step
        self.q, self.residuals = state["q"], state["residual"]
        pieces = flat.split(work.sizes)
        self.gradients = [pieces[i] for i in work.place_of_matrix]
        self.plain = [pieces[i] for i in work.place_of_plain]
        self.first, self.last = work.first, work.last

    def put_uncompressed(self) -> None:
        """Write what is not compressed as a matrix into the first message, beside the flags, which are there."""
        if self.step.unused:
            slots = [slot for matrix in self.work.matrices for slot in matrix.slots]
            clear_flags_of_unused(slots, self.first.flags, self.step)
        if self.plain:
            put_plain(self.plain, self.first.plain, self.step.world_size)


class LowRankKernel(Protocol):
    """The computations of a step, for all matrices of a bucket: `HostKernel` on the CPU, with branches; `DeviceKernel`
    on an accelerator, which the host never asks, with masks. `work`: the buffers."""

    work: Workspace

    def form_p(self, now: BucketPass) -> None:
        """delta = gradient + residual; P = delta Q, into the first message, with the flags: per parameter 1 if its
        gradient is not zero, 0 if it is zero, NaN if it is too large for the wire dtype."""

    def orthonormalize(self, now: BucketPass) -> None:
        """P = an orthonormal basis of the mean P."""

    def form_q(self, now: BucketPass) -> None:
        """Q = delta^T P, into the last message. A parameter without a gradient on any rank takes no part."""

    def form_remainder(self, now: BucketPass) -> None:
        """What can be computed while Q is on its way."""

    def split(self, now: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor) -> None:
        """gradient = P Q^T with the mean Q, into the bucket; and, where `good`, the mean Q and
        residual = delta - P Q^T with this rank's own Q. A parameter without a gradient on any rank keeps its residual:
        DDP may drop the result for it, and a residual sent in it would be lost. Where `finite` is false, gradients
        become NaN on every rank."""


def low_rank_exchange(flat: torch.Tensor, work: LowRankKernel, state: State, step: StepInfo) -> Exchange:
    """One step: Algorithm 1 on each matrix, inside the error feedback of Algorithm 2. See `Compressor.exchange`."""
    kernel, now = work, BucketPass(flat, work.work, state, step)
    kernel.form_p(now)  # 1. delta = gradient + residual; P = delta Q
    now.put_uncompressed()
    yield Send(now.first.buffer, what="P")  # 2. the mean of P
    kernel.orthonormalize(now)  # 3.
    kernel.form_q(now)  # 4. Q = delta^T P
    remainder = functools.partial(kernel.form_remainder, now)
    yield Send(now.last.buffer, what="Q", last=True, meanwhile=remainder)  # 5. the mean of Q
    finite = all_finite(now.work.buffer)
    good = yield Verdict(finite)
    if now.plain:
        divide(now.first.plain, now.plain)
    kernel.split(now, good, finite)  # 6. gradient = P Q^T; residual = delta - P Q^T with the own Q
    return None
