"""One bucket on an accelerator: the steps of `HostExchange`, for all matrices of one shape at once.

The host queues a few kernels per shape and never synchronises with the device; masks replace branches.
"""

from collections.abc import Callable

import torch

from commhooks.comm.wire import largest_gradient, put_factor, put_projection
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.host_exchange import HostExchange
from commhooks.compressors.powersgd.matrix_stack import MatrixStack
from commhooks.gradients.loss_scale import is_one


class DeviceExchange(HostExchange):
    """One bucket of one backward pass. Works on any device. Results equal those of `HostExchange` up to rounding if the
    rows of P are independent (see `codec.orthonormal_stack`)."""

    def form_p(self) -> None:
        s, message = self._work, self._with_p
        for stack, flags, factors in zip(s.stacks, message.stacked_flags, message.stacked_factors, strict=True):
            if stack.delta is not None:
                _gather(stack.gradients(self.buffer), stack)
            blocks = stack.blocks(self.buffer)
            self._put_flags(blocks, flags)
            self._add_residuals(stack, blocks)
            self._set_starting_q(stack)
            for part, delta in blocks:
                torch.bmm(stack.q[part], delta.transpose(1, 2), out=stack.p[part])
            put_factor(stack.p, factors, self._world_size)
        self._put_plain(message)

    def form_q(self) -> None:
        s = self._work
        with_p, with_q = self._with_p.stacked_factors, self._with_q.stacked_factors
        for stack, arrived, factors in zip(s.stacks, with_p, with_q, strict=True):
            refill = s.stacked_refill(stack, "P")
            stack.p.copy_(codec.orthonormal_stack(arrived.to(s.dtype), refill))
            for part, delta in stack.blocks(self.buffer):
                torch.bmm(stack.p[part], delta, out=stack.q[part])
            put_projection(stack.q, factors, self._world_size)

    def commit(self, good: torch.Tensor | bool) -> None:
        """Write the gradient P Q^T into the bucket and, where `good`, the residual delta - P Q_local^T and Q."""
        s = self._work
        self._store_plain(self._with_p)
        nan_if_bad = torch.where(self.good_here, 0.0, float("nan")).to(s.dtype)
        good = torch.as_tensor(good, device=self.buffer.device)
        flags, with_q = self._with_p.stacked_flags, self._with_q.stacked_factors
        for stack, flag, arrived in zip(s.stacks, flags, with_q, strict=True):
            has_gradient = (flag > 0).view(-1, 1, 1)
            keep = good & has_gradient
            blocks = stack.blocks(self.buffer)
            if self._error_feedback:
                self._commit_residuals(stack, blocks, keep)
            learned = stack.learned_q.bind(self._learned_q, self._draw_for(stack))
            torch.where(keep, arrived.to(s.dtype), learned, out=learned)
            torch.mul(arrived, has_gradient, out=stack.q).add_(nan_if_bad)
            for part, delta in blocks:
                torch.bmm(stack.p[part].transpose(1, 2), stack.q[part], out=delta)
            if stack.delta is not None:
                _scatter(stack, stack.gradients(self.buffer))

    def _commit_residuals(
        self, stack: MatrixStack, blocks: list[tuple[slice, torch.Tensor]], keep: torch.Tensor
    ) -> None:
        residuals = stack.residuals.bind(self._residuals)
        if not is_one(self._residual_factor):
            # Rescale even if the step is not committed: the host does not know the outcome and always updates the loss
            # scale that is stored with the residuals.
            residuals.mul_(self._residual_factor)
        for part, delta in blocks:
            delta.baddbmm_(stack.p[part].transpose(1, 2), stack.q[part], alpha=-1)
            torch.where(keep[part], delta, residuals[part], out=residuals[part])
        if stack.padded:  # drop the residual of the padding
            residuals.flatten(1)[:, stack.filled :].zero_()

    # ---- delta, flags, Q -------------------------------------------------------------------------------------------

    def _put_flags(self, blocks: list[tuple[slice, torch.Tensor]], flags: torch.Tensor) -> None:
        """Set the flag of each matrix: 1 if its gradient is not zero, 0 if it is zero, NaN if it is too large for the
        wire dtype."""
        extremes = [torch.aminmax(delta.flatten(1), dim=1) for _, delta in blocks]
        low, high = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*extremes, strict=True))
        has_gradient = (low != 0) | (high != 0)
        limit = largest_gradient(flags.dtype)
        if limit < torch.finfo(self.buffer.dtype).max:
            flags.copy_(torch.where(torch.maximum(-low, high) > limit, float("nan"), has_gradient.to(flags.dtype)))
        else:
            flags.copy_(has_gradient)

    def _add_residuals(self, stack: MatrixStack, blocks: list[tuple[slice, torch.Tensor]]) -> None:
        known = self._residuals
        if not self._error_feedback or not any(slot.name in known for x in stack.matrices for slot in x.slots):
            return
        residuals = stack.residuals.gather(known)
        for part, delta in blocks:
            if isinstance(self._residual_factor, float):
                delta.add_(residuals[part], alpha=self._residual_factor)
            else:
                delta.addcmul_(residuals[part], self._residual_factor)

    def _set_starting_q(self, stack: MatrixStack) -> None:
        """`k x r x m`, rows of norm 1; see `HostExchange._starting_q`."""
        if self._work.draws.warm_start:
            q = stack.learned_q.gather(self._learned_q, self._draw_for(stack))
        else:
            q = torch.stack([self._draw_q(x) for x in stack.matrices]).to(self.buffer.device)
        rows, missing = codec.unit_stack(q)
        stack.q.copy_(torch.where(missing, self._work.stacked_refill(stack, "Q"), rows))

    def _draw_for(self, stack: MatrixStack) -> Callable[[int], torch.Tensor]:
        return lambda i: self._draw_q(stack.matrices[i])


def _gather(pieces: list[torch.Tensor], stack: MatrixStack) -> None:
    """Copy the gradients into the deltas and zero the padding."""
    assert stack.delta is not None
    flat = stack.delta.view(-1)
    if stack.padded:
        flat[stack.filled :].zero_()
    if len(pieces) == 1:
        flat[: stack.filled].copy_(pieces[0])
    elif pieces[0].dtype == flat.dtype:
        torch.cat(pieces, out=flat)
    else:  # one kernel to concatenate and one to convert; converting each piece would take one kernel per piece
        flat.copy_(torch.cat(pieces))


def _scatter(stack: MatrixStack, pieces: list[torch.Tensor]) -> None:
    """Copy the deltas back into the gradients: the inverse of `_gather`."""
    assert stack.delta is not None
    flat = stack.delta.view(-1)
    if len(pieces) == 1:
        pieces[0].copy_(flat[: stack.filled])
    else:
        torch.split_with_sizes_copy(flat.to(pieces[0].dtype), [len(piece) for piece in pieces], out=pieces)
