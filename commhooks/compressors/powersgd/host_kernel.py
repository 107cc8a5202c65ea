"""A step on the CPU, matrix by matrix. The products are those of torch or of the native kernel."""

import functools
import itertools
from collections.abc import Sequence

import torch

from commhooks.comm.wire import largest_gradient, pack_factor, put_flags, put_only_factor, put_overflow, put_projection
from commhooks.compressors.powersgd.exchange import BucketPass
from commhooks.compressors.powersgd.message import QuantisedMessage
from commhooks.compressors.powersgd.native_products import NativeProducts
from commhooks.compressors.powersgd.torch_products import Residuals, TorchProducts
from commhooks.compressors.powersgd.workspace import Workspace
from commhooks.gradients.layout import Slot


class HostKernel:
    """A `LowRankKernel`, with the steps of `alternate` besides, which run on accelerators, too, with torch.

    Attributes:
        own_deltas: per matrix memory for delta, n x m; None where that is computed in the bucket.
    """

    def __init__(self, work: Workspace, products: TorchProducts | NativeProducts) -> None:
        self.work, self.products = work, products
        self._all = range(len(work.matrices))
        self._largest = None if work.is_whole_bucket else products.largest
        # The residual needs this rank's own Q as it was sent: of what blocks have lost, only the message knows.
        self.forms_remainder = work.error_feedback and work.quantised
        # Of `work`: bound to this kernel, they would hold it and its memory in a cycle.
        self._refill_p, self._refill_q = (functools.partial(work.refill, side) for side in "PQ")
        self.own_deltas = [
            None if work.in_bucket else torch.zeros(x.n, x.m, dtype=work.dtype, device=work.layout.device)
            for x in work.matrices
        ]
        if not work.alternate:
            first, last = (message.packed for message in work.messages)
            p, q, ranks = zip(*products.pieces, strict=True)
            self._sent_p = list(zip(p, _pieces(first, p), strict=True))
            self._sent_q = list(zip(q, _pieces(last, q), ranks, strict=True))
            self._largest_gradient = largest_gradient(first.dtype)

    # ---- P and Q ---------------------------------------------------------------------------------------------------

    def form_p(self, now: BucketPass) -> None:
        products, largest, flags = self.products, self._largest, now.first.flags
        if largest is None:
            self._put_flags(now)
        residuals = self._load_deltas(now)
        # Only the space that Q spans matters, and without scaling P would grow with the square of the gradient.
        products.unit_rows(self._known_q(now, self._all), self._refill_q)
        products.form("P", self._all, now.deltas, residuals, float(now.step.residual_factor))
        if largest is not None:
            flags.copy_((largest > 0).double().masked_fill_(largest > self._largest_gradient, float("nan")))
        for p, out in self._sent_p:
            pack_factor(p, out, now.step.world_size)

    def orthonormalize(self, now: BucketPass) -> None:
        arrived = [factor.to(self.work.dtype) for factor in now.first.factors]
        self.products.orthonormalize("P", self._all, arrived, self._refill_p)

    def form_q(self, now: BucketPass) -> None:
        if self.work.is_whole_bucket:  # what stays where it is takes no part in what is sent for the others
            for slot in self._idle(now)[0]:
                self._part(now, slot).zero_()
        self.products.form("Q", self._all, now.deltas)
        for q, out, rank in self._sent_q:
            put_projection(q, out, now.step.world_size, rank=rank)

    def form_factor(self, now: BucketPass) -> None:
        products, factor = self.products, float(now.step.residual_factor)
        self._put_flags(now)
        residuals = self._load_deltas(now)
        for makes_q in (False, True):
            places = [i for i in self._all if now.makes_q[i] == makes_q]
            deltas = [now.deltas[i] for i in places]
            own = None if residuals is None else [residuals[i] for i in places]
            if makes_q:
                known = [now.p[self.work.matrices[i].name] for i in places]
                products.orthonormalize("P", places, known, self._refill_p)
            else:
                products.orthonormalize("Q", places, self._known_q(now, places), self._refill_q)
            products.form("Q" if makes_q else "P", places, deltas, own, factor)
        for mine, out in zip(self._sent(now), now.first.factors, strict=True):
            put_only_factor(mine, out, now.step.world_size)

    def form_remainder(self, now: BucketPass) -> None:
        """Here of the factor alone: the rest is done in `split`, where delta is read once."""
        assert isinstance(now.last, QuantisedMessage)
        now.last.subtract_lost(self._sent(now))

    def _sent(self, now: BucketPass) -> list[torch.Tensor]:
        """Per matrix the factor of this rank that ends the step."""
        p, q = self.products.p, self.products.q
        return [q[i] if now.makes_q[i] else p[i] for i in self._all]

    # ---- gradient and residual -------------------------------------------------------------------------------------

    def split(self, now: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor) -> None:
        products = self.products
        factor = float(now.step.residual_factor)
        residuals: list[torch.Tensor] | None = None
        idle_of: list[list[Slot]] = []
        if good:
            idle_of = self._idle(now)
            places, mean_p, mean_q, residuals = self._keep(now, idle_of)
        else:
            places, mean_p, mean_q = list(self._all), products.p, products.q
            nan_if_bad = torch.where(finite, 0.0, float("nan")).to(self.work.dtype)
            for mine, arrived in zip(self._sent(now), now.last.factors, strict=True):
                mine.copy_(arrived).add_(nan_if_bad)
        products.split(places, [now.deltas[i] for i in places], residuals, mean_p, mean_q)
        for i in () if self.work.in_bucket else places:
            now.gradients[i].copy_(now.deltas[i].view(-1)[: len(now.gradients[i])])
        for slot in itertools.chain(*idle_of):  # their residuals wait, and follow the loss scale
            if slot.name in now.residuals and factor != 1:
                now.residuals[slot.name].mul_(factor)
            slot.of(now.flat).zero_()

    def _keep(
        self, now: BucketPass, idle_of: list[list[Slot]]
    ) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        """Update the learned state. Returns the matrices that have a gradient, their mean P and Q, and where their
        residuals go, unless these are written already."""
        work, products = self.work, self.products
        places, mean_p, mean_q, residuals = [], [], [], []
        for i, (matrix, idle) in enumerate(zip(work.matrices, idle_of, strict=True)):
            if len(idle) < len(matrix.slots):
                learned = self._keep_factor(now, i)
                places.append(i)
                mean_p.append(products.p[i] if now.makes_q[i] else learned)
                mean_q.append(learned if now.makes_q[i] else products.q[i])
                if work.error_feedback and not work.is_whole_bucket:
                    residuals.append(self._residual(now, matrix.slots[0]))
                elif work.error_feedback:
                    products.split([i], now.deltas, now.deltas, mean_p, None)
                    for slot in matrix.slots:  # the padding after the last slot keeps no residual
                        if slot not in idle:
                            self._residual(now, slot).copy_(self._part(now, slot))
        return places, mean_p, mean_q, residuals or None

    def _keep_factor(self, now: BucketPass, i: int) -> torch.Tensor:
        """Put the factor that has arrived into the learned state, in place of the other one."""
        name, arrived = self.work.matrices[i].name, now.last.factors[i]
        learned, other = (now.q, now.p) if now.makes_q[i] else (now.p, now.q)
        other.pop(name, None)
        if name not in learned:
            learned[name] = torch.empty_like(arrived, dtype=self.work.dtype)
        return learned[name].copy_(arrived)

    def _residual(self, now: BucketPass, slot: Slot) -> torch.Tensor:
        if slot.name not in now.residuals:
            now.residuals[slot.name] = torch.zeros(slot.numel, dtype=self.work.dtype, device=now.flat.device)
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

    def _known_q(self, now: BucketPass, places: Sequence[int]) -> list[torch.Tensor]:
        """Per matrix the learned Q, or the one to start from."""
        work, known = self.work, now.q if self.work.warm_start else {}
        return [
            known[x.name] if x.name in known else work.draw_q(x, now.step.number).to(now.flat.device)
            for x in map(work.matrices.__getitem__, places)
        ]

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
