"""One bucket, compressed: delta = gradient + residual -> P -> all-reduce -> Q -> all-reduce -> gradient, residual.

`HostExchange` processes one bucket of one backward pass in the buffers of a `Workspace`, matrix by matrix, on the CPU;
`DeviceExchange` does the same on an accelerator. Learned state is written only after the verdict.
"""

import functools
from collections.abc import Sequence

import torch

from commhooks.comm.wire import all_finite, put_all_plain, put_factor, put_overflow, put_projection
from commhooks.compressors.base import Exchange, State, StepInfo, Verdict
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.message import Message
from commhooks.compressors.powersgd.workspace import Workspace
from commhooks.gradients import precision
from commhooks.gradients.layout import Slot
from commhooks.gradients.pieces import divide


class HostExchange:
    """One bucket of one backward pass.

    Args:
        flat: the bucket's buffer, 1-D, changed in place.
        work: the workspace of the bucket's layout.
        state: "q" per matrix, `r x m`; "residual" per parameter, flat in memory order; with `alternate` "p", `r x n`.
        step: the step of this backward pass.
        error_feedback: keep residuals.
    """

    def __init__(
        self, flat: torch.Tensor, work: Workspace, state: State, step: StepInfo, *, error_feedback: bool
    ) -> None:
        self.buffer = flat
        self._work = work
        self._residuals = state["residual"]
        self._learned_q = state["q"]
        self._learned_p = state["p"]
        self._error_feedback = error_feedback
        self._world_size = step.world_size
        self._step = step
        self._residual_factor = float(step.residual_factor)  # `alternate` synchronises with an accelerator anyway
        self._on_host = precision.is_host_readable(flat.device)
        self._plain = [flat[begin:end] for begin, end in work.plain_spans]
        self._with_p, self._with_q = self._new_messages()

    def run(self) -> Exchange:
        """The exchange that the engine runs."""
        self.form_p()
        yield from self._with_p.sum_over_ranks(self._step, "P")
        self.form_q()
        yield from self._with_q.sum_over_ranks(self._step, "Q", last=True)
        self._with_q.subtract_lost(self._only_ranks(self._work.q))
        self.good_here = all_finite(self._with_p.buffer) & all_finite(self._with_q.buffer)
        good = yield Verdict(self.good_here)
        self.commit(good)
        return None

    @functools.cached_property
    def _delta(self) -> list[torch.Tensor]:
        """Per matrix delta, n x m: a view of the bucket, or memory of the workspace."""
        return [
            self.buffer[x.start : x.stop].view(x.n, x.m) if own is None else own
            for own, x in zip(self._work.delta, self._work.matrices, strict=True)
        ]

    def _new_messages(self) -> tuple[Message, Message]:
        """The messages of the first and of the second all-reduce."""
        s = self._work
        return s.message([x.n for x in s.matrices]), s.message([x.m for x in s.matrices], alone=True)

    def form_p(self) -> None:
        """Form delta in place and P = delta Q; write P, all uncompressed gradients and the flags into the first
        message."""
        s = self._work
        for i, matrix in enumerate(s.matrices):
            gradient = self.buffer[matrix.start : matrix.stop]
            self._put_flags_of(i, self._with_p)
            delta, residual = self._load_delta(i, gradient)
            self._set_factor(s.q[i], matrix, self._starting_q(matrix))
            s.kernels.add_and_project_p(delta, residual, self._residual_factor, s.q[i], matrix.rank, out=s.p[i])
            put_factor(s.p[i][: matrix.rank], self._with_p.factors[i], self._world_size)
        self._put_beside(self._with_p)

    def form_q(self) -> None:
        """Orthonormalise the received P, form Q = delta^T P and write it into the second message."""
        s = self._work
        for i, matrix in enumerate(s.matrices):
            if len(matrix.slots) > 1:  # what stays where it is takes no part in what is sent for the others
                for slot in self._idle[i]:
                    self._part(slot, matrix, self._delta[i]).zero_()
            self._set_factor(s.p[i], matrix, self._orthonormal(self._with_p.factors[i].to(s.dtype), matrix, "P"))
            s.kernels.add_and_project_q(self._delta[i], None, 1.0, s.p[i], matrix.rank, out=s.q[i])
            put_projection(s.q[i][: matrix.rank], self._with_q.factors[i], self._world_size)

    def commit(self, good: torch.Tensor | bool) -> None:
        """Write the gradient P Q^T into the bucket and, if `good`, the residual delta - P Q_local^T and Q.

        If this bucket is not finite, its gradients become NaN on every rank.
        """
        s = self._work
        self._store_beside(self._with_p, good)
        nan_if_bad = torch.where(self.good_here, 0.0, float("nan")).to(s.dtype)
        for i, matrix in enumerate(s.matrices):
            self._commit_matrix(i, matrix, bool(good), nan_if_bad)

    def _commit_matrix(self, i: int, matrix: Matrix, good: bool, nan_if_bad: torch.Tensor) -> None:
        s, delta, idle = self._work, self._delta[i], self._idle[i]
        if good and len(idle) == len(matrix.slots):
            self._skip(idle)
            return
        if not good:
            q = s.q[i]
            q[: matrix.rank] = self._with_q.factors[i]
            self._store_gradient(i, matrix, delta, q.add_(nan_if_bad))
            return
        q = self._q_memory(matrix).copy_(self._with_q.factors[i])
        if not self._error_feedback:
            self._store_gradient(i, matrix, delta, q)
        elif s.in_place[i]:
            residual = self._residual(matrix.slots[0]).view(matrix.n, matrix.m)
            s.kernels.split(delta, (s.p[i], s.q[i]), (s.p[i], q), matrix.rank, residual)
        else:
            self._store_residual(i, matrix, delta, idle)
            self._store_gradient(i, matrix, delta, q)
        self._skip(idle)

    @functools.cached_property
    def _idle(self) -> list[list[Slot]]:
        """Per matrix the parameters that have no gradient on any rank; known after the first all-reduce."""
        used = iter((self._with_p.flags > 0).tolist())
        return [[slot for slot in matrix.slots if not next(used)] for matrix in self._work.matrices]

    def _skip(self, slots: Sequence[Slot]) -> None:
        """No rank had a gradient: keep the residual. DDP may drop the result for a parameter that no rank used, and a
        residual sent in it would be lost."""
        for slot in slots:
            if slot.name in self._residuals and self._residual_factor != 1:
                self._residuals[slot.name].mul_(self._residual_factor)
            slot.of(self.buffer).zero_()

    # ---- gradients that are not compressed as matrices --------------------------------------------------------------

    def _put_beside(self, message: Message) -> None:
        if self._plain:
            put_all_plain(self._plain, message.plain, self._world_size)
        message.load(self.buffer, self._residuals, self._step)

    def _store_beside(self, message: Message, good: torch.Tensor | bool) -> None:
        if self._plain:
            divide(message.plain, self._plain)
        message.store(self.buffer, self._residuals, self._step, good)

    # ---- delta, residual, gradient ---------------------------------------------------------------------------------

    def _load_delta(self, i: int, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix delta (n x m), and its residual (n x m) if that has not been added to it yet."""
        own, matrix = self._work.delta[i], self._work.matrices[i]
        if self._work.in_place[i]:
            known = self._residuals.get(matrix.slots[0].name) if self._error_feedback else None
            return self._delta[i], None if known is None else known.view(matrix.n, matrix.m)
        flat = gradient
        if own is not None:
            flat = own.view(-1)
            flat[: gradient.numel()].copy_(gradient)
            flat[gradient.numel() :].zero_()
        if self._error_feedback:
            for slot in matrix.slots:
                residual = self._residuals.get(slot.name)
                if residual is not None:
                    self._part(slot, matrix, flat).add_(residual, alpha=self._residual_factor)
        return self._delta[i], None

    def _part(self, slot: Slot, matrix: Matrix, delta: torch.Tensor) -> torch.Tensor:
        """The part of one parameter in the delta of its matrix, 1-D."""
        begin = slot.offset - matrix.start
        return delta.view(-1)[begin : begin + slot.numel]

    def _residual(self, slot: Slot) -> torch.Tensor:
        residuals = self._residuals
        if slot.name not in residuals:
            residuals[slot.name] = torch.zeros(slot.numel, dtype=self._work.dtype, device=self.buffer.device)
        return residuals[slot.name]

    def _store_residual(self, i: int, matrix: Matrix, delta: torch.Tensor, idle: Sequence[Slot] = ()) -> None:
        s = self._work
        s.kernels.remainder(delta, s.p[i], s.q[i], matrix.rank, out=delta)
        for slot in matrix.slots:  # the padding after the last slot keeps no residual
            if slot not in idle:
                self._residual(slot).copy_(self._part(slot, matrix, delta))

    def _store_gradient(
        self, i: int, matrix: Matrix, delta: torch.Tensor, q: torch.Tensor, p: torch.Tensor | None = None
    ) -> None:
        p = self._work.p[i] if p is None else p
        self._work.kernels.reconstruct(p, q, matrix.rank, out=delta)
        if self._work.delta[i] is not None:
            self.buffer[matrix.start : matrix.stop].copy_(delta.view(-1)[: matrix.stop - matrix.start])

    # ---- Q, orthonormal bases, flags -------------------------------------------------------------------------------

    def _q_memory(self, matrix: Matrix) -> torch.Tensor:
        return self._learned_q.setdefault(matrix.name, self._known_q(matrix))

    def _known_q(self, matrix: Matrix) -> torch.Tensor:
        q = self._learned_q.get(matrix.name)
        return self._draw_q(matrix).to(self.buffer.device) if q is None else q

    def _draw_q(self, matrix: Matrix) -> torch.Tensor:
        """A random Q, r x m, on the CPU."""
        return self._work.draws.q(matrix, self._step.number, self._work.dtype)

    def _starting_q(self, matrix: Matrix) -> torch.Tensor:
        """The Q to start from, r x m, rows scaled to norm 1: only the space that they span matters, and without scaling
        P would grow with the square of the gradient. Zero rows are replaced by random ones."""
        q = self._learned_q.get(matrix.name) if self._work.draws.warm_start else None
        rows, missing = self._work.kernels.unit_rows(self._draw_q(matrix) if q is None else q)
        if missing is None or not missing.any():
            return rows
        refill, _ = codec.unit_rows(self._work.refill(matrix, "Q"))
        return torch.where(missing, refill, rows)

    def _only_ranks(self, factors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One factor per matrix, without the padding row of rank 1."""
        return [factor[: x.rank] for factor, x in zip(factors, self._work.matrices, strict=True)]

    def _set_factor(self, factor: torch.Tensor, matrix: Matrix, rows: torch.Tensor) -> None:
        factor[: matrix.rank] = rows
        if matrix.rank < len(factor):  # the padding row of rank 1: an inf in delta turns it into NaN
            factor[matrix.rank :].zero_()

    def _orthonormal(self, rows: torch.Tensor, matrix: Matrix, side: str) -> torch.Tensor:
        if self._on_host:
            basis, missing = self._work.kernels.orthonormal_rows(rows, None)
            if missing is None or not missing.any():
                return basis
        return codec.orthonormal_rows(rows, self._work.refill(matrix, side))[0]

    def _put_flags_of(self, i: int, message: Message) -> None:
        """Set the flag of each parameter in matrix i: 1 if its gradient is not zero, 0 if it is zero, NaN if it is too
        large for the wire dtype."""
        flags = message.flags[self._work.flags_of[i]]
        for slot, flag in zip(self._work.matrices[i].slots, flags, strict=True):
            gradient = slot.of(self.buffer)
            if self._on_host:
                # The first 64 elements nearly always contain a nonzero one.
                flag.fill_(float(bool(gradient[:64].any()) or bool(gradient.any())))
            else:
                flag.copy_(gradient.any())
            put_overflow(gradient, flag)
