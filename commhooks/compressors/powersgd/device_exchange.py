"""One bucket on an accelerator: the steps of `HostExchange`, for all matrices at once.

The host never synchronises with the device, and masks replace branches. Per matrix, or per shape with deltas of their
own, run seven kernels that read or write it: gradient's maximum, sum with the residual, P, Q, new residual, its mask,
gradient. Everything else works on the packed factors of the whole bucket, so the number of kernels depends neither on
the number of layers nor on the rank.
"""

import torch

from commhooks.comm.wire import all_finite, largest_gradient, put_all_plain, put_factor, put_projection
from commhooks.compressors.base import Exchange, State, StepInfo, Verdict
from commhooks.compressors.powersgd.device_workspace import DeviceWorkspace
from commhooks.gradients.loss_scale import chosen, is_one
from commhooks.gradients.pieces import divide, join

Blocks = list[tuple[slice, torch.Tensor]]


class DeviceExchange:
    """One bucket of one backward pass. Works on any device. Results equal those of `HostExchange` up to rounding if the
    rows of P are independent (see `codec.orthonormal_stack`). For the arguments see `HostExchange`."""

    def __init__(
        self, flat: torch.Tensor, work: DeviceWorkspace, state: State, step: StepInfo, *, error_feedback: bool
    ) -> None:
        self._work = work
        self._residuals = state["residual"]
        self._learned_q = state["q"]
        self._error_feedback = error_feedback
        self._flat = flat
        self._step = step
        pieces = flat.split([stop - start for start, stop in work.spans])
        self._plain = [pieces[i] for i in work.place_of_plain]
        gradients = [pieces[i] for i in work.place_of_matrix]
        self._gradients = [gradients[x.first : x.first + len(x)] for x in work.stacks]
        self._used: torch.Tensor | None = None
        """Which elements of a matrix of several parameters belong to one that has a gradient on some rank."""
        self._blocks: list[Blocks] = [x.blocks(own) for x, own in zip(work.stacks, self._gradients, strict=True)]

    def run(self) -> Exchange:
        """The exchange that the engine runs."""
        work, step = self._work, self._step
        self.form_p()
        yield from work.first.sum_over_ranks(step, "P")
        self.form_q()
        form_remainders = self.form_remainders if self._error_feedback else None
        yield from work.second.sum_over_ranks(step, "Q", last=True, meanwhile=form_remainders)
        self.good_here = all_finite(work.both)
        good = yield Verdict(self.good_here)
        self.commit(good)
        return None

    def form_p(self) -> None:
        """Form delta in place and P = delta Q; write P, all uncompressed gradients and the flags into the first
        message."""
        work = self._work
        self._load_deltas()
        self._put_flags()
        self._add_residuals()
        work.q.unit_rows(self._starting_q())
        for stack, blocks in zip(work.stacks, self._blocks, strict=True):
            for part, delta in blocks:
                torch.bmm(stack.q[part], delta.transpose(1, 2), out=stack.p[part])
        put_factor(work.p.flat, work.first.packed, self._step.world_size)
        if self._plain:
            put_all_plain(self._plain, work.first.plain, self._step.world_size)
        work.first.load(self._flat, self._residuals, self._step)

    def form_q(self) -> None:
        """Orthonormalise the received P, form Q = delta^T P and write it into the second message. P of a matrix
        without a gradient on any rank becomes zero: its residual then stays, and its averaged gradient is zero."""
        work = self._work
        self._has_gradient = used = work.first.flags > 0
        if work.parts is not None:
            self._has_gradient = used.any().view(1)
            self._used = torch.cat([used, used.new_zeros(1)])
            self._used = self._used.repeat_interleave(work.parts, output_size=work.stacks[0].n * work.stacks[0].m)
        work.p.orthonormalise(work.first.packed, self._has_gradient)
        for stack, blocks in zip(work.stacks, self._blocks, strict=True):
            for part, delta in blocks:
                if self._used is not None:  # what stays where it is takes no part in what is sent for the others
                    delta.mul_(self._used.view_as(delta))
                torch.bmm(stack.p[part], delta, out=stack.q[part])
        put_projection(work.q.flat, work.second.packed, self._step.world_size, rank=work.largest_rank)

    def form_remainders(self) -> None:
        """delta - P Q_local^T in place, while Q is on its way: the next residuals."""
        self._work.second.subtract_lost([self._work.q.flat])
        for stack, blocks in zip(self._work.stacks, self._blocks, strict=True):
            for part, delta in blocks:
                delta.baddbmm_(stack.p[part].transpose(1, 2), stack.q[part], alpha=-1)

    def commit(self, good: torch.Tensor | bool) -> None:
        """Write the gradient P Q^T into the bucket and, where `good`, the residual and Q.

        If this bucket is not finite, its gradients become NaN on every rank.
        """
        work = self._work
        good = torch.as_tensor(good, device=work.layout.device)
        if self._error_feedback:
            self._commit_residuals(good)
        q = work.q.flat.copy_(work.second.packed)
        learned = work.learned_q.bind(self._learned_q, self._draw_q)[:-1]
        keep = (good & self._has_gradient).index_select(0, work.q.matrix_of)
        torch.where(keep, q, learned, out=learned)
        q.add_(torch.where(self.good_here, 0.0, float("nan")))
        for stack, blocks in zip(work.stacks, self._blocks, strict=True):
            for part, delta in blocks:
                torch.bmm(stack.p[part].transpose(1, 2), stack.q[part], out=delta)
                if self._used is not None:
                    delta.mul_(self._used.view_as(delta))
        work.first.store(self._flat, self._residuals, self._step, good)
        self._store_gradients()

    def _commit_residuals(self, good: torch.Tensor) -> None:
        work = self._work
        whole = work.residuals.bind(self._residuals)
        for blocks, residuals in zip(self._blocks, work.residuals_of_stacks(whole), strict=True):
            for part, delta in blocks:
                keep = good
                if self._used is not None:  # the padding keeps no residual
                    keep = good & self._used.view_as(delta)
                    factor = chosen(good, self._step.residual_factor, 1.0)
                    if not is_one(factor):
                        residuals[part].mul_(factor)
                torch.where(keep, delta, residuals[part], out=residuals[part])

    # ---- delta, flags, Q -------------------------------------------------------------------------------------------

    def _load_deltas(self) -> None:
        """Copy the gradients of stacks with deltas of their own, and zero the padding."""
        for stack, gradients in zip(self._work.stacks, self._gradients, strict=True):
            if stack.delta is None:
                continue
            flat = stack.delta.view(-1)
            if stack.padded:
                flat[stack.filled :].zero_()
            join(gradients, flat[: stack.filled * len(stack)])

    def _put_flags(self) -> None:
        """Set the flag of each parameter in the matrices: 1 if its gradient is not zero, 0 if it is zero, NaN if it is
        too large for the wire dtype."""
        work, flags = self._work, self._work.first.flags
        for stack, blocks in zip(work.stacks, self._blocks, strict=True):
            largest = work.largest[stack.first : stack.first + len(stack)]
            for part, delta in blocks:
                if work.parts is None:
                    torch.linalg.vector_norm(delta, float("inf"), dim=(1, 2), out=largest[part])
                    continue
                for slot, out in zip(work.slots, work.largest, strict=True):
                    gradient = delta.view(-1)[slot.offset : slot.stop]
                    if slot.numel == 0:
                        out.zero_()
                    else:
                        torch.linalg.vector_norm(gradient, float("inf"), out=out)
        has_gradient = work.largest != 0
        limit = largest_gradient(flags.dtype)
        if limit < torch.finfo(work.layout.dtype).max:
            flags.copy_(torch.where(work.largest > limit, float("nan"), has_gradient.to(flags.dtype)))
        else:
            flags.copy_(has_gradient)

    def _add_residuals(self) -> None:
        work, known = self._work, self._residuals
        if not self._error_feedback or not any(slot.name in known for x in work.matrices for slot in x.slots):
            return
        whole = work.residuals.gather(known)
        for blocks, residuals in zip(self._blocks, work.residuals_of_stacks(whole), strict=True):
            for part, delta in blocks:
                if isinstance(self._step.residual_factor, float):
                    delta.add_(residuals[part], alpha=self._step.residual_factor)
                else:
                    delta.addcmul_(residuals[part], self._step.residual_factor)

    def _starting_q(self) -> torch.Tensor:
        """The Q to start from, packed; see `HostExchange._starting_q`."""
        work = self._work
        if work.draws.warm_start:
            return work.learned_q.gather(self._learned_q, self._draw_q)
        drawn = [self._draw_q(i).flatten() for i in range(len(work.matrices))]
        return torch.cat([*drawn, torch.zeros(1, dtype=work.dtype)]).to(work.layout.device)

    def _draw_q(self, i: int) -> torch.Tensor:
        """A random Q for matrix i, r x m, on the CPU."""
        return self._work.draws.q(self._work.matrices[i], self._step.number, self._work.dtype)

    # ---- the averaged gradients ------------------------------------------------------------------------------------

    def _store_gradients(self) -> None:
        """Copy uncompressed gradients, and gradients with a tensor of their own, into the bucket."""
        if self._plain:
            divide(self._work.first.plain, self._plain)
        for stack, gradients in zip(self._work.stacks, self._gradients, strict=True):
            if stack.delta is not None:
                divide(stack.delta.view(-1)[: stack.filled * len(stack)], gradients)
