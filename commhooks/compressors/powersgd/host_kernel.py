"""A step on the CPU, matrix by matrix. The products are those of torch or of the native kernel."""

import functools
import itertools

import torch

from commhooks.comm.wire import largest_gradient, pack_factor, put_flags, put_overflow, put_projection
from commhooks.compressors.powersgd.exchange import BucketPass
from commhooks.compressors.powersgd.native_products import NativeProducts
from commhooks.compressors.powersgd.torch_products import Residuals, TorchProducts
from commhooks.compressors.powersgd.workspace import Workspace
from commhooks.gradients.layout import Slot


class HostKernel:
    """A `LowRankKernel`.

    Attributes:
        own_deltas: per matrix memory for delta, n x m; None where that is computed in the bucket.
    """

    def __init__(self, work: Workspace, products: TorchProducts | NativeProducts) -> None:
        self.work, self.products = work, products
        self._largest = None if work.is_whole_bucket else products.largest
        # Of `work`: bound to this kernel, they would hold it and its memory in a cycle.
        self._refill_p, self._refill_q = (functools.partial(work.refill, side) for side in "PQ")
        self.own_deltas = [None if work.in_bucket else torch.zeros(x.n, x.m, dtype=work.dtype) for x in work.matrices]
        p, q, ranks = zip(*products.pieces, strict=True)
        self._sent_p = list(zip(p, _pieces(work.first.packed, p), strict=True))
        self._sent_q = list(zip(q, _pieces(work.last.packed, q), ranks, strict=True))
        self._largest_gradient = largest_gradient(work.buffer.dtype)

    # ---- P and Q ---------------------------------------------------------------------------------------------------

    def form_p(self, now: BucketPass) -> None:
        products, largest, flags = self.products, self._largest, now.first.flags
        if largest is None:
            self._put_flags(now)
        residuals = self._load_deltas(now)
        # Only the space that Q spans matters, and without scaling P would grow with the square of the gradient.
        products.unit_rows(self._known_q(now), self._refill_q)
        products.form_p(now.deltas, residuals, float(now.step.residual_factor))
        if largest is not None:
            flags.copy_((largest > 0).double().masked_fill_(largest > self._largest_gradient, float("nan")))
        for p, out in self._sent_p:
            pack_factor(p, out, now.step.world_size)

    def orthonormalize(self, now: BucketPass) -> None:
        arrived = [factor.to(self.work.dtype) for factor in now.first.factors]
        self.products.orthonormalize(arrived, self._refill_p)

    def form_q(self, now: BucketPass) -> None:
        if self.work.is_whole_bucket:  # what stays where it is takes no part in what is sent for the others
            for slot in self._idle(now)[0]:
                self._part(now, slot).zero_()
        self.products.form_q(now.deltas)
        for q, out, rank in self._sent_q:
            put_projection(q, out, now.step.world_size, rank=rank)

    def form_remainder(self, now: BucketPass) -> None:
        """Nothing: `split` forms it with the gradient, so that it reads delta once."""

    # ---- gradient and residual -------------------------------------------------------------------------------------

    def split(self, now: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor) -> None:
        products = self.products
        factor = float(now.step.residual_factor)
        residuals: list[torch.Tensor] | None = None
        idle_of: list[list[Slot]] = []
        if good:
            idle_of = self._idle(now)
            places, mean_q, residuals = self._keep(now, idle_of)
        else:
            places, mean_q = list(range(len(self.work.matrices))), products.q
            nan_if_bad = torch.where(finite, 0.0, float("nan")).to(self.work.dtype)
            for mine, arrived in zip(mean_q, now.last.factors, strict=True):
                mine.copy_(arrived).add_(nan_if_bad)
        products.split(places, [now.deltas[i] for i in places], residuals, mean_q)
        for i in () if self.work.in_bucket else places:
            now.gradients[i].copy_(now.deltas[i].view(-1)[: len(now.gradients[i])])
        for slot in itertools.chain(*idle_of):  # their residuals wait, and follow the loss scale
            if slot.name in now.residuals and factor != 1:
                now.residuals[slot.name].mul_(factor)
            slot.of(now.flat).zero_()

    def _keep(
        self, now: BucketPass, idle_of: list[list[Slot]]
    ) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor] | None]:
        """Update the learned state. Returns the matrices that have a gradient, their mean Q, and where their residuals
        go, unless these are written already."""
        work = self.work
        places, mean_q, residuals = [], [], []
        for i, (matrix, idle) in enumerate(zip(work.matrices, idle_of, strict=True)):
            if len(idle) < len(matrix.slots):
                if matrix.name not in now.q:
                    now.q[matrix.name] = torch.empty_like(now.last.factors[i], dtype=work.dtype)
                places.append(i)
                mean_q.append(now.q[matrix.name].copy_(now.last.factors[i]))
                if work.error_feedback and not work.is_whole_bucket:
                    residuals.append(self._residual(now, matrix.slots[0]))
                elif work.error_feedback:
                    self.products.split([i], now.deltas, now.deltas, None)
                    for slot in matrix.slots:  # the padding after the last slot keeps no residual
                        if slot not in idle:
                            self._residual(now, slot).copy_(self._part(now, slot))
        return places, mean_q, residuals or None

    def _residual(self, now: BucketPass, slot: Slot) -> torch.Tensor:
        if slot.name not in now.residuals:
            now.residuals[slot.name] = torch.zeros(slot.numel, dtype=self.work.dtype)
        return now.residuals[slot.name]

    # ---- delta, Q, flags -------------------------------------------------------------------------------------------

    def _load_deltas(self, now: BucketPass) -> Residuals | None:
        """Set `now.deltas`, per matrix n x m, and return the residuals that have not been added to them yet."""
        work = self.work
        now.deltas = []
        for own, gradient, x in zip(self.own_deltas, now.gradients, work.matrices, strict=True):
            if own is not None:
                own.view(-1)[: len(gradient)].copy_(gradient)
                own.view(-1)[len(gradient) :].zero_()
            now.deltas.append(gradient.view(x.n, x.m) if own is None else own)
        if not work.error_feedback:
            return None
        if not work.is_whole_bucket:
            return [now.residuals.get(x.slots[0].name) for x in work.matrices]
        for slot in work.matrices[0].slots:
            if slot.name in now.residuals:
                self._part(now, slot).add_(now.residuals[slot.name], alpha=float(now.step.residual_factor))
        return None

    def _part(self, now: BucketPass, slot: Slot) -> torch.Tensor:
        """The part of one parameter in the delta of a whole bucket, 1-D."""
        begin = slot.offset - self.work.matrices[0].slots[0].offset
        return now.deltas[0].view(-1)[begin : begin + slot.numel]

    def _known_q(self, now: BucketPass) -> list[torch.Tensor]:
        """Per matrix the learned Q, or the one to start from."""
        work, known = self.work, now.q if self.work.warm_start else {}
        return [known[x.name] if x.name in known else work.draw_q(x, now.step.number) for x in work.matrices]

    def _idle(self, now: BucketPass) -> list[list[Slot]]:
        """Per matrix the parameters that have no gradient on any rank."""
        used = (now.first.flags > 0).tolist()
        idle: list[list[Slot]] = []
        for matrix, places in zip(self.work.matrices, self.work.flags_of, strict=True):
            own = zip(matrix.slots, used[places], strict=True)
            idle.append([] if all(used[places]) else [slot for slot, has_gradient in own if not has_gradient])
        return idle

    def _put_flags(self, now: BucketPass) -> None:
        gradients = [slot.of(now.flat) for matrix in self.work.matrices for slot in matrix.slots]
        put_flags(gradients, now.first.flags)
        for gradient, flag in zip(gradients, now.first.flags, strict=True):
            put_overflow(gradient, flag)


def _pieces(packed: torch.Tensor, like: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The pieces of a message for these factors."""
    return [piece.view_as(x) for piece, x in zip(packed.split([x.numel() for x in like]), like, strict=True)]
