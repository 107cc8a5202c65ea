"""One bucket on the CPU with the native kernel: the steps of `HostExchange`, each for all matrices in one call."""

import torch

from commhooks.comm.wire import largest_gradient, put_factor, put_projection
from commhooks.compressors.base import State, StepInfo
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.fused_workspace import FusedWorkspace
from commhooks.compressors.powersgd.host_exchange import HostExchange


class FusedExchange(HostExchange):
    """One bucket of one backward pass. Results equal those of `HostExchange` up to rounding. For the arguments see
    there."""

    _work: FusedWorkspace

    def __init__(
        self, flat: torch.Tensor, work: FusedWorkspace, state: State, step: StepInfo, *, error_feedback: bool
    ) -> None:
        super().__init__(flat, work, state, step, error_feedback=error_feedback)
        work.point_to_deltas(flat)

    def form_p(self) -> None:
        work, message = self._work, self._with_p
        for own, matrix in zip(work.delta, work.matrices, strict=True):
            if own is not None:
                own.view(-1).copy_(self.buffer[matrix.start : matrix.stop])
        self._form_starting_q()
        known = [self._residuals.get(x.slots[0].name) if self._error_feedback else None for x in work.matrices]
        work.table.point("residual", known)
        work.kernel.form_p_of(work.table, self._residual_factor)
        self._put_flags(work.table.largest)
        put_factor(work.all_p, message.packed, self._world_size)
        self._put_beside(message)

    def form_q(self) -> None:
        work = self._work
        arrived = self._with_p.packed.to(work.dtype)
        rows = [piece.view_as(p) for piece, p in zip(arrived.split([p.numel() for p in work.p]), work.p, strict=True)]
        work.basis_p.point("source", rows)
        work.kernel.unit_rows_of(work.basis_p, orthogonal=True)
        for i, missing in enumerate(work.basis_p.missing):
            if missing:
                refill = work.refill(work.matrices[i], "P")
                work.p[i].copy_(work.kernel.orthonormal_rows(rows[i], refill)[0])
        work.table.column("residual").zero_()  # part of delta already
        work.kernel.form_q_of(work.table, 1.0)
        for part, rank in work.equal_ranks:
            put_projection(work.all_q[part], self._with_q.packed[part], self._world_size, rank=rank)

    def commit(self, good: torch.Tensor | bool) -> None:
        if not bool(good):
            super().commit(good)
            return
        self._store_beside(self._with_p, good)
        has_gradient = (self._with_p.flags > 0).tolist()
        for matrix, has in zip(self._work.matrices, has_gradient, strict=True):
            if not has:
                self._skip(matrix.slots)
        self._split([i for i, has in enumerate(has_gradient) if has])

    def _split(self, places: list[int]) -> None:
        """Write the residuals, the gradients and the learned Q of some matrices."""
        work = self._work
        matrices = [work.matrices[i] for i in places]
        q = [self._q_memory(x) for x in matrices]
        for learned, i in zip(q, places, strict=True):
            learned.copy_(self._with_q.factors[i])
        table = work.table.only(places)
        table.point("mean_q", q)
        if self._error_feedback:
            table.point("residual", [self._residual(x.slots[0]) for x in matrices])
        work.kernel.split_of(table)
        for i, matrix in zip(places, matrices, strict=True):
            own = work.delta[i]
            if own is not None:
                self.buffer[matrix.start : matrix.stop].copy_(own.view(-1))

    def _form_starting_q(self) -> None:
        """See `HostExchange._starting_q`."""
        work = self._work
        known = self._learned_q if work.draws.warm_start else {}
        sources = [known[x.name] if x.name in known else self._draw_q(x) for x in work.matrices]
        work.unit_q.point("source", sources)
        work.kernel.unit_rows_of(work.unit_q, orthogonal=False)
        for i, missing in enumerate(work.unit_q.missing):
            if missing:
                rows, zero = codec.unit_rows(sources[i])
                refill, _ = codec.unit_rows(work.refill(work.matrices[i], "Q"))
                torch.where(zero, refill, rows, out=work.q[i])

    def _put_flags(self, largest: torch.Tensor) -> None:
        """Set the flags as `_put_flags_of` does, from the largest absolute value of each gradient."""
        flags = (largest > 0).to(torch.float64)
        too_large = largest > largest_gradient(self._with_p.flags.dtype)
        self._with_p.flags.copy_(flags.masked_fill_(too_large, float("nan")))
