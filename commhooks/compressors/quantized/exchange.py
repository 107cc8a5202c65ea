"""One bucket as a quantised all-reduce with error feedback.

    delta = gradient + residual, quantised; an all-to-all sends each rank the blocks of which it is the owner
    the owner averages them, quantises the mean, and an all-gather sends it to everyone
    all ranks decode the same bytes

What is lost goes into the residuals: at the sender, the rounding of its delta; at the owner, that of the mean, times
the number of ranks. The owner's own delta does not travel and is not rounded.

The owner's part is the server of DoubleSqueeze (Tang, Yu, Lian, Zhang, Liu: ICML 2019).
"""

import torch

from commhooks.comm.wire import all_finite, put_plain
from commhooks.compressors.base import Exchange, Send, State, StepInfo, Verdict
from commhooks.compressors.quantized.message import Parts
from commhooks.compressors.quantized.workspace import Workspace, slots_of
from commhooks.gradients import precision
from commhooks.gradients.loss_scale import chosen, is_one


class QuantizedExchange:
    """One bucket of one backward pass. Works on any device; on an accelerator the host never waits for it.

    Args:
        flat: the bucket's buffer, 1-D: this rank's gradient, replaced by the average.
        work: the workspace of the bucket's layout.
        state: "residual" per parameter, flat in memory order; written after the verdict.
        step: the step of this backward pass.
        error_feedback: keep residuals.
    """

    def __init__(
        self, flat: torch.Tensor, work: Workspace, state: State, step: StepInfo, *, error_feedback: bool
    ) -> None:
        self._flat = flat
        self._work = work
        self._route = work.route(step.world_size)
        self._residuals = state["residual"]
        self._step = step
        self._error_feedback = error_feedback
        self._on_host = precision.is_host_readable(flat.device)
        self._largest = torch.finfo(flat.dtype).max

    def run(self) -> Exchange:
        """The exchange that the engine runs."""
        route = self._route
        self._form_delta()
        own = self._own_share()
        self._quantise_delta()
        messages = yield Send(route.sent, "shares", op="all_to_all")
        self._average(route.format.parts(messages), own)
        messages = yield Send(
            route.mean, "means", op="gather", last=True, meanwhile=lambda: self._keep_rounding_of_mean(own)
        )
        arrived = route.format.parts(messages)
        good = yield Verdict(all_finite(arrived.scales) & all_finite(arrived.plain))
        self._commit(arrived, good)
        return None

    # ---- the sender ------------------------------------------------------------------------------------------------

    def _form_delta(self) -> None:
        """delta = gradient + residual, in blocks."""
        work, factor = self._work, self._step.residual_factor
        delta = work.delta.view(-1)
        before = work.residuals.gather(self._residuals) if self._error_feedback else None
        if before is not None and not is_one(factor):
            before = torch.mul(before, factor, out=delta)
        for slot, at in work.spans:
            gradient, here = slot.of(self._flat), slice(at, at + slot.numel)
            if before is None:
                delta[here].copy_(gradient)
            else:
                torch.add(before[here], gradient, out=delta[here])
        for begin, end in work.padding:
            delta[begin:end].zero_()

    def _own_share(self) -> torch.Tensor:
        """What this rank contributes to the mean of its own share, exact: `size x block_size`."""
        mine = self._route.shares.blocks[self._step.rank]
        return self._work.delta.index_select(0, mine).div_(self._step.world_size)

    def _quantise_delta(self) -> None:
        """Fill the messages to all ranks, and leave in delta what its rounding lost."""
        work, route = self._work, self._route
        inner = slice(0, work.blocks)
        work.code.quantise(work.delta[inner], work.codes[inner], work.scales[inner], self._largest)
        sent, blocks = route.format.parts(route.sent), route.shares.blocks.view(-1)
        sent.scales.copy_(work.scales.index_select(0, blocks).view_as(sent.scales))
        sent.codes.copy_(work.codes.index_select(0, blocks).view_as(sent.codes))
        plain, flags = route.plain.view(-1), route.flags.view(-1)
        for at, gradient in slots_of(self._flat, work.plain):
            put_plain(gradient, plain[at : at + len(gradient)], self._step.world_size)
        for i, slot in enumerate(work.slots):
            self._flag(slot.of(self._flat), flags[i])
        sent.plain.copy_(route.plain)
        sent.flags.copy_(route.flags)

    def _flag(self, gradient: torch.Tensor, flag: torch.Tensor) -> None:
        """1 if the gradient is not zero. DDP may drop the result for a parameter that no rank used, and a residual sent
        in it would be lost."""
        if self._on_host:
            # The first 64 elements nearly always contain a nonzero one.
            flag.fill_(bool(gradient[:64].any()) or bool(gradient.any()))
        else:
            flag.copy_(gradient.any())

    # ---- the owner of a share ----------------------------------------------------------------------------------------

    def _average(self, arrived: Parts, own: torch.Tensor) -> None:
        """Average this rank's share over the ranks, in their order after its own part, and write it into the message
        to all ranks. Leaves in `own` what the rounding of the mean lost."""
        work, route, step = self._work, self._route, self._step
        mean = route.format.parts(route.mean)
        plain = torch.zeros(mean.plain.shape, dtype=work.dtype, device=own.device)
        for rank in range(step.world_size):
            plain.add_(arrived.plain[rank])
            if rank != step.rank:
                codes = arrived.codes[rank].view(-1, work.code.block_bytes)
                work.code.add_dequantised(codes, arrived.scales[rank] / step.world_size, own)
        work.code.quantise(own, mean.codes.view(-1, work.code.block_bytes), mean.scales, self._largest)
        mean.plain.copy_(plain)
        mean.flags.copy_(arrived.flags.amax(0))

    def _keep_rounding_of_mean(self, lost: torch.Tensor) -> None:
        """Let the remainder of delta be, in this rank's share, what the rounding of the mean lost."""
        step, shares = self._step, self._route.shares
        count = shares.counts[step.rank]
        self._work.delta.index_copy_(0, shares.blocks[step.rank, :count], lost[:count].mul_(step.world_size))

    # ---- the commit --------------------------------------------------------------------------------------------------

    def _commit(self, arrived: Parts, good: torch.Tensor | bool) -> None:
        """Write the averaged gradient into the bucket and, where `good`, the residuals.

        What is not finite arrives as NaN on every rank. A parameter without a gradient on any rank keeps its residual,
        and its averaged gradient is zero.
        """
        work, shares = self._work, self._route.shares
        has_gradient = arrived.flags.reshape(-1)[: len(work.slots)] > 0
        every = self._on_host and bool(has_gradient.all())
        used = None if every else has_gradient.index_select(0, work.parameter_of).unsqueeze(1)
        if self._error_feedback:
            self._store_residuals(good, used)
        codes = arrived.codes.reshape(-1, work.code.block_bytes).index_select(0, shares.places)
        mean = work.code.dequantise(codes, arrived.scales.reshape(-1).index_select(0, shares.places), work.delta[:-1])
        if used is not None:
            mean.masked_fill_(~used, 0)
        flat = mean.view(-1)
        for slot, at in work.spans:
            slot.of(self._flat).copy_(flat[at : at + slot.numel])
        plain = arrived.plain.reshape(-1)
        for at, gradient in slots_of(self._flat, work.plain):
            gradient.copy_(plain[at : at + len(gradient)])

    def _store_residuals(self, good: torch.Tensor | bool, used: torch.Tensor | None) -> None:
        """What remains of delta becomes the residual, where `good` and `used` (bool, `blocks x 1`; None: all)."""
        if good is False:
            return
        work, factor = self._work, self._step.residual_factor
        work.residuals.bind(self._residuals)
        before, left = work.residual_blocks[:-1], work.delta[:-1]
        if good is True and used is None:
            before.copy_(left)
            return
        # Residuals that stay take the new loss scale only if the step is committed.
        factor = chosen(good, factor, 1.0)
        if not is_one(factor):
            before.mul_(factor)
        keep = torch.as_tensor(good, device=left.device) if used is None else used & good
        torch.where(keep, left, before, out=before)
