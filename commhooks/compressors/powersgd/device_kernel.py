"""A step on an accelerator, for all matrices at once.

The host never synchronises with the device, and masks replace branches. Per matrix, or per shape with deltas of their
own, run seven kernels that read or write it: gradient's maximum, sum with the residual, P, Q, new residual, its mask,
gradient. Everything else works on the packed factors of the whole bucket, so the number of kernels depends neither on
the number of layers nor on the rank.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commhooks.comm.wire import divide, join, largest_gradient, pack_factor, put_projection
from commhooks.compressors.named_views import NamedViews
from commhooks.compressors.powersgd.exchange import BucketPass
from commhooks.compressors.powersgd.packed_factors import PackedFactors, new_packed
from commhooks.compressors.powersgd.workspace import Matrix, Workspace
from commhooks.gradients.loss_scale import chosen, is_one


@dataclass(frozen=True, eq=False)
class Block:
    """`k` matrices `n x m` of one rank whose deltas are one tensor, so that one kernel multiplies all of them.

    Attributes:
        members: their places among all matrices.
        delta: memory for the deltas, `k x n x m`; None: those of one matrix are computed in the bucket.
        p, q, largest: their factors, `k x r x n` and `k x r x m`, and the largest number of each gradient.
    """

    members: slice
    shape: tuple[int, int, int]
    delta: torch.Tensor | None
    p: torch.Tensor
    q: torch.Tensor
    largest: torch.Tensor


class DeviceKernel:
    """A `LowRankKernel`. Works on any device. Its results equal those of `HostKernel` up to rounding if the rows of P
    are independent (see `codec.orthonormal_stack`).

    Args:
        work: its matrices are ordered by shape (`by_shape`).
        stack_deltas: copy the gradients so that the deltas of one shape are one tensor.

    Attributes:
        p, q: the factors of all matrices.
        parts: of a whole bucket the numbers of elements of each parameter and of the padding.
        largest: per parameter in the matrices the largest absolute value of its gradient.
    """

    def __init__(self, work: Workspace, *, stack_deltas: bool) -> None:
        self.work = work
        self.p, self.q = self._factors("P"), self._factors("Q")
        self.slots = [slot for x in work.matrices for slot in x.slots]
        self.largest = torch.zeros(len(self.slots), dtype=work.dtype, device=work.layout.device)
        self.parts: torch.Tensor | None = None
        if work.is_whole_bucket:
            padding = work.matrices[0].n * work.matrices[0].m - work.layout.numel
            self.parts = torch.tensor([*(slot.numel for slot in self.slots), padding]).to(work.layout.device)
        self.blocks: list[Block] = []
        begin = p = q = 0
        for _, group in itertools.groupby(work.matrices, key=_shape):
            members = list(group)
            n, m, r = _shape(members[0])
            own = not work.in_bucket or (stack_deltas and len(members) > 1)
            k = len(members) if own else 1
            for _ in range(len(members) // k):
                delta = torch.zeros(k, n, m, dtype=work.dtype, device=work.layout.device) if own else None
                own_p = self.p.flat[p : p + k * r * n].view(k, r, n)
                own_q = self.q.flat[q : q + k * r * m].view(k, r, m)
                largest = self.largest[begin : begin + k]
                self.blocks.append(Block(slice(begin, begin + k), (k, n, m), delta, own_p, own_q, largest))
                begin, p, q = begin + k, p + k * r * n, q + k * r * m

    # ---- the steps -------------------------------------------------------------------------------------------------

    def form_p(self, now: BucketPass) -> None:
        self._load_deltas(now)
        self._put_flags(now)
        self._add_residuals(now)
        self.q.unit_rows(self._starting_q(now))
        for block, delta in zip(self.blocks, now.deltas, strict=True):
            torch.bmm(block.q, delta.transpose(1, 2), out=block.p)
        pack_factor(self.p.flat, now.first.packed, now.step.world_size)

    def orthonormalize(self, now: BucketPass) -> None:
        """P of a matrix without a gradient on any rank becomes zero: its residual then stays, and its averaged gradient
        is zero."""
        used = now.first.flags > 0
        now.used = used if self.parts is None else used.any().view(1)
        if self.parts is not None:
            size = self.work.matrices[0].n * self.work.matrices[0].m
            elements = torch.cat([used, used.new_zeros(1)]).repeat_interleave(self.parts, output_size=size)
            now.used_elements = elements.view(self.blocks[0].shape)
        self.p.orthonormalise(now.first.packed, now.used)

    def form_q(self, now: BucketPass) -> None:
        for block, delta in zip(self.blocks, now.deltas, strict=True):
            if now.used_elements is not None:  # what stays where it is takes no part in what is sent for the others
                delta.mul_(now.used_elements)
            torch.bmm(block.p, delta, out=block.q)
        put_projection(self.q.flat, now.last.packed, now.step.world_size, rank=max(x.rank for x in self.work.matrices))

    def form_remainder(self, now: BucketPass) -> None:
        """delta - P Q^T in place, while Q is on its way: the next residuals."""
        for block, delta in zip(self.blocks, now.deltas, strict=True) if self.work.error_feedback else ():
            delta.baddbmm_(block.p.transpose(1, 2), block.q, alpha=-1)

    def split(self, now: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor) -> None:
        good = torch.as_tensor(good, device=self.work.layout.device)
        if self.work.error_feedback:
            self._keep_residuals(now, good)
        q = self.q.flat.copy_(now.last.packed)
        learned = self._learned_q.bind(now.q, functools.partial(self._draw_q, now))[:-1]
        keep = (good & now.used).index_select(0, self.q.matrix_of)
        torch.where(keep, q, learned, out=learned)
        q.add_(torch.where(finite, 0.0, float("nan")))
        for block, delta in zip(self.blocks, now.deltas, strict=True):
            torch.bmm(block.p.transpose(1, 2), block.q, out=delta)
            if now.used_elements is not None:
                delta.mul_(now.used_elements)
            if block.delta is not None:
                gradients = now.gradients[block.members]
                divide(delta.view(-1)[: sum(map(len, gradients))], gradients)

    # ---- delta and residual ----------------------------------------------------------------------------------------

    def _load_deltas(self, now: BucketPass) -> None:
        """Set `now.deltas`, one per block."""
        now.deltas = []
        for block in self.blocks:
            gradients = now.gradients[block.members]
            if block.delta is None:
                now.deltas.append(gradients[0].view(block.shape))
                continue
            now.deltas.append(block.delta)
            flat, filled = block.delta.view(-1), sum(map(len, gradients))
            if filled < len(flat):
                flat[filled:].zero_()
            join(gradients, flat[:filled])

    def _put_flags(self, now: BucketPass) -> None:
        flags = now.first.flags
        if self.parts is None:
            for block, delta in zip(self.blocks, now.deltas, strict=True):
                torch.linalg.vector_norm(delta, float("inf"), dim=(1, 2), out=block.largest)
        else:
            for slot, out in zip(self.slots, self.largest, strict=True):
                if slot.numel:
                    gradient = now.deltas[0].view(-1)[slot.offset : slot.stop]
                    torch.linalg.vector_norm(gradient, float("inf"), out=out)
                else:
                    out.zero_()
        has_gradient = self.largest != 0
        limit = largest_gradient(flags.dtype)
        if limit < torch.finfo(self.work.layout.dtype).max:
            flags.copy_(torch.where(self.largest > limit, float("nan"), has_gradient.to(flags.dtype)))
        else:
            flags.copy_(has_gradient)

    def _add_residuals(self, now: BucketPass) -> None:
        factor = now.step.residual_factor
        if not self.work.error_feedback or not any(slot.name in now.residuals for slot in self.slots):
            return
        self._residuals.gather(now.residuals)
        for delta, residual in zip(now.deltas, self._residual_of, strict=True):
            if isinstance(factor, float):
                delta.add_(residual, alpha=factor)
            else:
                delta.addcmul_(residual, factor)

    def _keep_residuals(self, now: BucketPass, good: torch.Tensor) -> None:
        self._residuals.bind(now.residuals)
        for delta, residual in zip(now.deltas, self._residual_of, strict=True):
            keep = good
            if now.used_elements is not None:  # the padding keeps no residual
                keep = good & now.used_elements
                factor = chosen(good, now.step.residual_factor, 1.0)
                if not is_one(factor):
                    residual.mul_(factor)
            torch.where(keep, delta, residual, out=residual)

    @functools.cached_property
    def _residuals(self) -> NamedViews:
        """The residuals of all matrices, 1-D; one flat entry per parameter. Allocated at first use."""
        names, begin = [], 0
        for x in self.work.matrices:
            names += [(slot.name, begin + slot.offset - x.span[0], (slot.numel,)) for slot in x.slots]
            begin += x.n * x.m
        return NamedViews(names, torch.zeros(begin, dtype=self.work.dtype, device=self.work.layout.device))

    @functools.cached_property
    def _residual_of(self) -> list[torch.Tensor]:
        """Those of each block, as its delta."""
        pieces = self._residuals.whole.split([k * n * m for k, n, m in (block.shape for block in self.blocks)])
        return [piece.view(block.shape) for piece, block in zip(pieces, self.blocks, strict=True)]

    # ---- factors ---------------------------------------------------------------------------------------------------

    def _factors(self, side: str) -> PackedFactors:
        shapes = [(x.rank, x.n if side == "P" else x.m) for x in self.work.matrices]
        refill = [self.work.refill(side, i) for i in range(len(self.work.matrices))]
        return PackedFactors(shapes, refill, self.work.dtype, self.work.layout.device)

    @functools.cached_property
    def _learned_q(self) -> NamedViews:
        """The Q of all matrices, as `PackedFactors`; one entry `r x m` per matrix. Allocated at first use."""
        names, begin = [], 0
        for x in self.work.matrices:
            names.append((x.name, begin, (x.rank, x.m)))
            begin += x.rank * x.m
        return NamedViews(names, new_packed(begin, self.work.dtype, self.work.layout.device))

    def _starting_q(self, now: BucketPass) -> torch.Tensor:
        """The Q to start from, packed."""
        fill = functools.partial(self._draw_q, now)
        if self.work.warm_start:
            return self._learned_q.gather(now.q, fill)
        drawn = [fill(i).flatten() for i in range(len(self.work.matrices))]
        return torch.cat([*drawn, torch.zeros(1, dtype=self.work.dtype)]).to(self.work.layout.device)

    def _draw_q(self, now: BucketPass, i: int) -> torch.Tensor:
        return self.work.draw_q(self.work.matrices[i], now.step.number)


def by_shape(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Matrices of one shape and rank next to each other, in the order of their first ones."""
    shapes = list(dict.fromkeys(map(_shape, matrices)))
    return sorted(matrices, key=lambda matrix: shapes.index(_shape(matrix)))


def _shape(matrix: Matrix) -> tuple[int, int, int]:
    return matrix.n, matrix.m, matrix.rank
