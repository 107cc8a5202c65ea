"""One bucket, compressed with one matrix product and one all-reduce per step: P and Q in turn.

A step that has Q computes P = delta basis(Q), with an orthonormal basis of Q, and uses the gradient P basis(Q)^T. The
next step computes Q = delta^T basis(P) with that P, and so on. Two such steps perform the power iteration of one step
of `HostExchange`. The scheme is that of epfml/powersgd, the code of PowerSGD's authors.
"""

import torch

from commhooks.comm.wire import all_finite, put_only_factor
from commhooks.compressors.base import Exchange, Verdict
from commhooks.compressors.powersgd.host_exchange import HostExchange
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.message import Message


class AlternatingExchange(HostExchange):
    """One bucket of one backward pass. Unlike in `HostExchange`, the learned state of a matrix determines which factor
    it sends. The host therefore must know at each commit whether the step was finite and which matrices had a gradient,
    and synchronises with an accelerator.

    The learned state of a matrix holds the factor received last: either "q" or "p".
    """

    def run(self) -> Exchange:
        self.form_factor()
        yield from self._with_p.sum_over_ranks(self._step, "P or Q", last=True)
        s = self._work
        sent = [q if makes_q else p for p, q, makes_q in zip(s.p, s.q, self._makes_q, strict=True)]
        self._with_p.subtract_lost(self._only_ranks(sent))
        self.good_here = all_finite(self._with_p.buffer)
        good = yield Verdict(self.good_here)
        self.commit(good)
        return None

    def _new_messages(self) -> tuple[Message, Message]:
        s = self._work
        self._makes_q = [x.name in self._learned_p for x in s.matrices]
        message = s.message([x.m if makes_q else x.n for x, makes_q in zip(s.matrices, self._makes_q, strict=True)])
        return message, message

    def form_factor(self) -> None:
        """Form delta in place, compute one of the two factors, and write that factor, all uncompressed gradients and
        the flags into the message."""
        s, message = self._work, self._with_p
        for i, matrix in enumerate(s.matrices):
            gradient = self.buffer[matrix.start : matrix.stop]
            self._put_flags_of(i, message)
            delta, residual = self._load_delta(i, gradient)
            p, q = s.p[i], s.q[i]
            if self._makes_q[i]:
                self._set_factor(p, matrix, self._orthonormal(self._learned_p[matrix.name], matrix, "P"))
                s.kernels.add_and_project_q(delta, residual, self._residual_factor, p, matrix.rank, out=q)
                put_only_factor(q[: matrix.rank], message.factors[i], self._world_size)
            else:
                self._set_factor(q, matrix, self._orthonormal(self._known_q(matrix), matrix, "Q"))
                s.kernels.add_and_project_p(delta, residual, self._residual_factor, q, matrix.rank, out=p)
                put_only_factor(p[: matrix.rank], message.factors[i], self._world_size)
        self._put_beside(message)

    def commit(self, good: torch.Tensor | bool) -> None:
        """Write the gradient into the bucket and, if `good`, the residual and the received factor."""
        self._store_beside(self._with_p, good)
        for i, (matrix, idle) in enumerate(zip(self._work.matrices, self._idle, strict=True)):
            if not good or len(idle) < len(matrix.slots):
                self._commit(i, matrix, bool(good))
            if good:
                self._skip(idle)

    def _commit(self, i: int, matrix: Matrix, good: bool) -> None:
        s, delta, arrived = self._work, self._delta[i], self._with_p.factors[i]
        p, q, makes_q = s.p[i], s.q[i], self._makes_q[i]
        if not good:
            # If this bucket is not finite, set all of its gradients to NaN.
            nan_if_bad = 0.0 if bool(self.good_here) else float("nan")
            (q if makes_q else p)[: matrix.rank] = arrived + nan_if_bad
            self._store_gradient(i, matrix, delta, q)
            return
        if makes_q:
            mean_p, mean_q = p, self._factor(self._learned_q, matrix, matrix.m).copy_(arrived)
            self._drop(self._learned_p, matrix)
        else:
            mean_p, mean_q = self._factor(self._learned_p, matrix, matrix.n).copy_(arrived), q
            self._drop(self._learned_q, matrix)
        if self._error_feedback and s.in_place[i]:
            residual = self._residual(matrix.slots[0]).view(matrix.n, matrix.m)
            s.kernels.split(delta, (p, q), (mean_p, mean_q), matrix.rank, residual)
            return
        if self._error_feedback:
            self._store_residual(i, matrix, delta, self._idle[i])
        self._store_gradient(i, matrix, delta, mean_q, mean_p)

    def _factor(self, learned: dict[str, torch.Tensor], matrix: Matrix, length: int) -> torch.Tensor:
        """The entry of `learned` for the matrix, `r x length`. A new entry reuses the memory of a dropped factor."""
        if matrix.name not in learned:
            spare = self._work.spare.pop((matrix.name, length), None)
            if spare is None:
                spare = torch.empty(matrix.rank, length, dtype=self._work.dtype, device=self.buffer.device)
            learned[matrix.name] = spare
        return learned[matrix.name]

    def _drop(self, learned: dict[str, torch.Tensor], matrix: Matrix) -> None:
        """Forget a factor that the other one replaces, and keep its memory."""
        old = learned.pop(matrix.name, None)
        if old is not None:
            self._work.spare[matrix.name, old.shape[1]] = old
