"""One bucket, compressed with one product and one all-reduce per step: P and Q in turn.

A step that knows Q makes P = delta Q^ (Q^: an orthonormal basis of Q) and continues with P Q^^T; the next one makes
Q = delta^T P^ of that P, and so on. Two steps of this do the power iteration of one step of `LowRankExchange`. The
scheme is that of epfml/powersgd, the code of PowerSGD's authors.
"""

import torch

from commhooks.comm.collective import start_all_reduce
from commhooks.comm.wire import all_finite, put_only_factor
from commhooks.compressors.powersgd.host_exchange import LowRankExchange
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.workspace import Packed


class AlternatingExchange(LowRankExchange):
    """One bucket on its way. As `LowRankExchange`, but what a matrix sends depends on what it has learned, so that the
    host must know at each commit which steps were finite and which matrices had a gradient: it waits for the device."""

    def _packed(self) -> tuple[Packed, Packed]:
        s = self._scratch
        self._makes_q = [x.name in self._memory.p_is_newer for x in s.matrices]
        packed = s.packed([x.m if makes_q else x.n for x, makes_q in zip(s.matrices, self._makes_q, strict=True)])
        return packed, packed

    def start(self) -> None:
        """Form delta in place, make the one factor or the other, and send it with everything uncompressed."""
        s, packed = self._scratch, self._with_p
        for i, matrix in enumerate(s.matrices):
            gradient = self.buffer[matrix.start : matrix.stop]
            self._flag(gradient, packed.flags[i])
            delta, residual = self._load_delta(i, gradient)
            p, q = s.p[i], s.q[i]
            if self._makes_q[i]:
                self._set_factor(p, matrix, self._orthonormal(self._memory.p[matrix.name], matrix, "P"))
                if residual is not None:
                    delta.add_(residual, alpha=self._residual_factor)
                s.products.project_q(delta, p, matrix.rank, out=q)
                put_only_factor(q[: matrix.rank], packed.factors[i], self._world_size)
            else:
                self._set_factor(q, matrix, self._orthonormal(self._q_memory(matrix), matrix, "Q"))
                s.products.add_and_project(delta, residual, self._residual_factor, q, matrix.rank, out=p)
                put_only_factor(p[: matrix.rank], packed.factors[i], self._world_size)
        self._put_plain(packed)
        self._first = start_all_reduce(packed.buffer, self._group, self._stats, f"P or Q of {self._label}")

    def advance(self) -> None:
        """Nothing to do: there is one all-reduce only."""

    def finish(self) -> torch.Tensor:
        """Wait; returns whether all that arrived is finite (0-dim bool)."""
        assert self._first is not None
        self._first.wait()
        self._good = all_finite(self._with_p.buffer)
        return self._good

    def commit(self, good: torch.Tensor | bool) -> None:
        """Write the gradient into the bucket and, if `good`, the residual and the factor that arrived."""
        self._store_plain(self._with_p)
        alive = (self._with_p.flags > 0).tolist()
        for i, matrix in enumerate(self._scratch.matrices):
            if bool(good) and not alive[i]:
                self._skip(matrix)
            else:
                self._commit(i, matrix, bool(good))

    def _commit(self, i: int, matrix: Matrix, good: bool) -> None:
        s, delta, arrived = self._scratch, self._delta[i], self._with_p.factors[i]
        p, q, makes_q = s.p[i], s.q[i], self._makes_q[i]
        if not good:
            # A bucket that is not finite itself leaves NaN in all of its gradients.
            poison = 0.0 if bool(self._good) else float("nan")
            (q if makes_q else p)[: matrix.rank] = arrived + poison
            self._store_gradient(i, matrix, delta, q)
            return
        if makes_q:
            mean_p, mean_q = p, self._q_memory(matrix).copy_(arrived)
            self._memory.p_is_newer.discard(matrix.name)
        else:
            mean_p, mean_q = self._p_memory(matrix).copy_(arrived), q
            self._memory.p_is_newer.add(matrix.name)
        if self._options.use_error_feedback and s.in_place[i]:
            residual = self._residual(*matrix.slots[0]).view(matrix.n, matrix.m)
            s.products.split(delta, (p, q), (mean_p, mean_q), matrix.rank, residual)
            return
        if self._options.use_error_feedback:
            self._store_residual(i, matrix, delta)
        self._store_gradient(i, matrix, delta, mean_q, mean_p)

    def _p_memory(self, matrix: Matrix) -> torch.Tensor:
        memory = self._memory.p
        if matrix.name not in memory:
            memory[matrix.name] = torch.empty(
                matrix.rank, matrix.n, dtype=self._scratch.dtype, device=self.buffer.device
            )
        return memory[matrix.name]
