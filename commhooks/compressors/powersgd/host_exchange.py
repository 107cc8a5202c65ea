"""One bucket, compressed: delta = gradient + residual -> P -> all-reduce -> Q -> all-reduce -> gradient, residual.

`LowRankExchange` takes one bucket of one backward pass through the buffers of `LowRankScratch`, matrix by matrix, on
the CPU; `MaskedExchange` does the same on an accelerator. Nothing learned is written before `commit`.
"""

from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collective import Pending, new_future, start_all_reduce
from commhooks.comm.counters import Stats
from commhooks.comm.wire import all_finite, put_factor, put_overflow, put_plain, put_projection
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.workspace import LowRankOptions, LowRankScratch, Packed
from commhooks.engine.state import Memory
from commhooks.gradients import precision
from commhooks.gradients.layout import Slot
from commhooks.gradients.loss_scale import LossScale


class LowRankExchange:
    """One bucket on its way. `start`, `advance`, `finish`, `commit`: in this order, on all ranks."""

    def __init__(
        self,
        buffer: torch.Tensor,
        scratch: LowRankScratch,
        memory: Memory,
        options: LowRankOptions,
        group: dist.ProcessGroup,
        stats: Stats,
        residual_factor: LossScale,
        label: str = "a bucket",
    ) -> None:
        self.buffer = buffer
        self.future = new_future(buffer.device)
        self._scratch = scratch
        self._memory = memory
        self._options = options
        self._group = group
        self._world_size = group.size()
        self._stats = stats
        self._label = label
        # The loss scale has changed by this factor since the residuals were written.
        self._residual_factor: Any = residual_factor
        self._on_host = precision.host_may_look(buffer.device)
        self._first: Pending | None = None
        self._second: Pending | None = None
        self._with_p, self._with_q = self._packed()
        self._delta = [
            buffer[x.start : x.stop].view(x.n, x.m) if own is None else own
            for own, x in zip(scratch.delta, scratch.matrices, strict=False)  # a stack has its own
        ]

    def _packed(self) -> tuple[Packed, Packed]:
        """What travels in the first all-reduce and in the second."""
        s = self._scratch
        return s.packed([x.n for x in s.matrices]), s.packed([x.m for x in s.matrices], alone=True)

    def start(self) -> None:
        """Form delta in place, P = delta Q, and send it with everything uncompressed and the flags."""
        s = self._scratch
        for i, matrix in enumerate(s.matrices):
            gradient = self.buffer[matrix.start : matrix.stop]
            self._flag(gradient, self._with_p.flags[i])
            delta, residual = self._load_delta(i, gradient)
            self._set_factor(s.q[i], matrix, self._starting_q(matrix))
            s.products.add_and_project(delta, residual, self._residual_factor, s.q[i], matrix.rank, out=s.p[i])
            put_factor(s.p[i][: matrix.rank], self._with_p.factors[i], self._world_size)
        self._put_plain(self._with_p)
        self._first = start_all_reduce(self._with_p.buffer, self._group, self._stats, f"P of {self._label}")

    def advance(self) -> None:
        """Wait for P, orthonormalise it, Q = delta^T P, and send that."""
        assert self._first is not None
        self._first.wait()
        s = self._scratch
        for i, matrix in enumerate(s.matrices):
            self._set_factor(s.p[i], matrix, self._orthonormal(self._with_p.factors[i].to(s.dtype), matrix, "P"))
            s.products.project_q(self._delta[i], s.p[i], matrix.rank, out=s.q[i])
            put_projection(s.q[i][: matrix.rank], self._with_q.factors[i], self._world_size)
        self._second = start_all_reduce(self._with_q.buffer, self._group, self._stats, f"Q of {self._label}")

    def finish(self) -> torch.Tensor:
        """Wait for Q; returns whether all that arrived is finite (0-dim bool)."""
        assert self._second is not None
        self._second.wait()
        self._good = all_finite(self._with_p.buffer) & all_finite(self._with_q.buffer)
        return self._good

    def commit(self, good: torch.Tensor | bool) -> None:
        """Write the gradient P Q^T into the bucket and, if `good`, the residual delta - P Q_local^T and Q.

        A bucket that is not finite itself leaves NaN in its gradients on every rank.
        """
        s = self._scratch
        self._store_plain(self._with_p)
        poison = torch.where(self._good, 0.0, float("nan")).to(s.dtype)
        alive = (self._with_p.flags > 0).tolist()
        for i, matrix in enumerate(s.matrices):
            self._commit_matrix(i, matrix, bool(good), alive[i], poison)

    def _commit_matrix(self, i: int, matrix: Matrix, good: bool, alive: bool, poison: torch.Tensor) -> None:
        s, delta = self._scratch, self._delta[i]
        if good and not alive:
            self._skip(matrix)
            return
        if not good:
            q = s.q[i]
            q[: matrix.rank] = self._with_q.factors[i]
            self._store_gradient(i, matrix, delta, q.add_(poison))
            return
        q = self._q_memory(matrix).copy_(self._with_q.factors[i])
        if not self._options.use_error_feedback:
            self._store_gradient(i, matrix, delta, q)
        elif s.in_place[i]:
            name, slot = matrix.slots[0]
            residual = self._residual(name, slot).view(matrix.n, matrix.m)
            s.products.split(delta, (s.p[i], s.q[i]), (s.p[i], q), matrix.rank, residual)
        else:
            self._store_residual(i, matrix, delta)
            self._store_gradient(i, matrix, delta, q)

    def _skip(self, matrix: Matrix) -> None:
        """No rank had a gradient: keep the residual for later instead of losing it to a step that is not taken."""
        for name, _ in matrix.slots:
            if name in self._memory.residuals and self._residual_factor != 1:
                self._memory.residuals[name].mul_(self._residual_factor)
        self.buffer[matrix.start : matrix.stop].zero_()

    # ---- what is not compressed ------------------------------------------------------------------------------------

    def _put_plain(self, packed: Packed) -> None:
        for (begin, end), out in zip(self._scratch.plain_spans, packed.plain, strict=True):
            put_plain(self.buffer[begin:end], out, self._world_size)

    def _store_plain(self, packed: Packed) -> None:
        for (begin, end), mean in zip(self._scratch.plain_spans, packed.plain, strict=True):
            self.buffer[begin:end].copy_(mean)

    # ---- delta, residual, gradient ---------------------------------------------------------------------------------

    def _load_delta(self, i: int, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix delta, and its residual if that has not been added yet."""
        own, matrix = self._scratch.delta[i], self._scratch.matrices[i]
        if self._scratch.in_place[i]:
            known = self._memory.residuals.get(matrix.slots[0][0]) if self._options.use_error_feedback else None
            return self._delta[i], None if known is None else known.view(matrix.n, matrix.m)
        flat = gradient
        if own is not None:
            flat = own.view(-1)
            flat[: gradient.numel()].copy_(gradient)
            flat[gradient.numel() :].zero_()
        if self._options.use_error_feedback:
            for name, slot in matrix.slots:
                residual = self._memory.residuals.get(name)
                if residual is not None:
                    begin = slot.offset - matrix.start
                    flat[begin : begin + slot.numel].add_(residual, alpha=self._residual_factor)
        return self._delta[i], None

    def _residual(self, name: str, slot: Slot) -> torch.Tensor:
        residuals = self._memory.residuals
        if name not in residuals:
            residuals[name] = torch.zeros(slot.numel, dtype=self._scratch.dtype, device=self.buffer.device)
        return residuals[name]

    def _store_residual(self, i: int, matrix: Matrix, delta: torch.Tensor) -> None:
        s = self._scratch
        codec.remainder(delta, s.p[i], s.q[i], matrix.rank, out=delta)
        flat = delta.view(-1)
        for name, slot in matrix.slots:  # what lies behind them is padding, whose residual is dropped
            begin = slot.offset - matrix.start
            self._residual(name, slot).copy_(flat[begin : begin + slot.numel])

    def _store_gradient(
        self, i: int, matrix: Matrix, delta: torch.Tensor, q: torch.Tensor, p: torch.Tensor | None = None
    ) -> None:
        codec.reconstruct(self._scratch.p[i] if p is None else p, q, matrix.rank, out=delta)
        if self._scratch.delta[i] is not None:
            self.buffer[matrix.start : matrix.stop].copy_(delta.view(-1)[: matrix.stop - matrix.start])

    # ---- Q, directions, flags --------------------------------------------------------------------------------------

    def _q_memory(self, matrix: Matrix) -> torch.Tensor:
        q = self._memory.q.get(matrix.name)
        if q is None:
            q = self._memory.q[matrix.name] = self._draw_q(matrix).to(self.buffer.device)
        return q

    def _draw_q(self, matrix: Matrix) -> torch.Tensor:
        """r x m, on the CPU."""
        return self._options.draw_q(matrix, self._memory.step, self._scratch.dtype)

    def _starting_q(self, matrix: Matrix) -> torch.Tensor:
        """r x m, rows of norm 1: only the space that they span matters, and otherwise P would grow with the square of
        the gradient. A row of zeros is a missing direction."""
        q = self._memory.q.get(matrix.name) if self._options.warm_start else None
        rows, missing = self._scratch.products.unit_rows(self._draw_q(matrix) if q is None else q)
        if missing is None or not missing.any():
            return rows
        refill, _ = codec.unit_rows(self._scratch.refill(matrix, "Q", self._options))
        return torch.where(missing, refill, rows)

    def _set_factor(self, factor: torch.Tensor, matrix: Matrix, rows: torch.Tensor) -> None:
        factor[: matrix.rank] = rows
        if matrix.rank < len(factor):  # the padding of rank 1: an inf in delta would have left NaN in it
            factor[matrix.rank :].zero_()

    def _orthonormal(self, rows: torch.Tensor, matrix: Matrix, side: str) -> torch.Tensor:
        if self._on_host:
            basis, missing = self._scratch.products.orthonormal_rows(rows, None)
            if missing is None or not missing.any():
                return basis
        return codec.orthonormal_rows(rows, self._scratch.refill(matrix, side, self._options))[0]

    def _flag(self, gradient: torch.Tensor, flag: torch.Tensor) -> None:
        """1 if there is a gradient, 0 if it is zero; NaN if it is too large for the wire."""
        if self._on_host:
            # A look at the first few numbers nearly always settles it.
            flag.fill_(float(bool(gradient[:64].any()) or bool(gradient.any())))
        else:
            flag.copy_(gradient.any())
        put_overflow(gradient, flag)
