"""A step on the CPU, matrix by matrix. The products are those of torch or of the native kernel."""

import functools
from collections.abc import Sequence

import torch

from commhooks.comm.wire import largest_gradient, put_factor, put_only_factor, put_overflow, put_projection
from commhooks.compressors.powersgd.native_products import NativeProducts
from commhooks.compressors.powersgd.torch_products import Refill, Residuals, Tensors, TorchProducts
from commhooks.compressors.powersgd.workspace import BucketPass, Matrix, Workspace
from commhooks.gradients import precision
from commhooks.gradients.layout import Slot


class HostKernel:
    """A `LowRankKernel` and an `AlternatingKernel`.

    Attributes:
        own_deltas: per matrix memory for delta, n x m; None where that is computed in the bucket.
    """

    def __init__(self, work: Workspace, products: TorchProducts | NativeProducts) -> None:
        self.work, self.products = work, products
        self._everything = range(len(work.matrices))
        self._on_host = precision.is_host_readable(work.layout.device)
        self._refills: dict[tuple[str, int], torch.Tensor] = {}
        self.own_deltas = [
            None if work.in_bucket else torch.zeros(x.n, x.m, dtype=work.dtype, device=work.layout.device)
            for x in work.matrices
        ]

    # ---- one factor and the other ----------------------------------------------------------------------------------

    def form_p(self, now: BucketPass) -> None:
        work, products = self.work, self.products
        finds_largest = products.finds_largest and not work.is_whole_bucket
        if not finds_largest:
            self._put_flags(now)
        residuals = self._load_deltas(now)
        # Only the space that Q spans matters, and without scaling P would grow with the square of the gradient.
        products.unit_rows(
            [self._known_q(now, x, now.q if work.warm_start else {}) for x in work.matrices], self._refill("Q")
        )
        largest = products.form_p(self._everything, now.deltas, residuals, self._factor(now))
        if finds_largest and largest is not None:
            too_large = largest > largest_gradient(now.first.flags.dtype)
            now.first.flags.copy_((largest > 0).double().masked_fill_(too_large, float("nan")))
        outs = now.first.packed.split([p.numel() for p, _, _ in products.pieces])
        for (p, _, _), out in zip(products.pieces, outs, strict=True):
            put_factor(p, out.view_as(p), now.step.world_size)

    def orthonormalize(self, now: BucketPass) -> None:
        arrived = [factor.to(self.work.dtype) for factor in now.first.factors]
        self.products.orthonormalize("P", self._everything, arrived, self._refill("P"))

    def form_q(self, now: BucketPass) -> None:
        products = self.products
        if self.work.is_whole_bucket:  # what stays where it is takes no part in what is sent for the others
            for slot in self._idle(now)[0]:
                self._part(now, slot).zero_()
        products.form_q(self._everything, now.deltas, [None] * len(now.deltas), 1.0)
        outs = now.last.packed.split([q.numel() for _, q, _ in products.pieces])
        for (_, q, rank), out in zip(products.pieces, outs, strict=True):
            put_projection(q, out.view_as(q), now.step.world_size, rank=rank)

    def form_factor(self, now: BucketPass) -> None:
        work, products = self.work, self.products
        self._put_flags(now)
        residuals, factor = self._load_deltas(now), self._factor(now)
        makes_p = [i for i, makes_q in enumerate(now.makes_q) if not makes_q]
        makes_q = [i for i, makes_q in enumerate(now.makes_q) if makes_q]
        known = [self._known_q(now, work.matrices[i], now.q) for i in makes_p]
        products.orthonormalize("Q", makes_p, known, self._refill("Q"))
        products.orthonormalize("P", makes_q, [now.p[work.matrices[i].name] for i in makes_q], self._refill("P"))
        products.form_p(makes_p, now.deltas, residuals, factor)
        products.form_q(makes_q, now.deltas, residuals, factor)
        for mine, out in zip(self._sent(now), now.first.factors, strict=True):
            put_only_factor(mine, out, now.step.world_size)

    def form_remainder(self, now: BucketPass) -> None:
        now.last.subtract_lost(self._sent(now))  # `split` forms the remainder

    def _sent(self, now: BucketPass) -> list[torch.Tensor]:
        """Per matrix the factor of this rank that ends the step."""
        p, q = self.products.p, self.products.q
        return [q[i] if makes_q else p[i] for i, makes_q in enumerate(now.makes_q)]

    # ---- gradient and residual -------------------------------------------------------------------------------------

    def split(self, now: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor) -> None:
        work, products = self.work, self.products
        if not good:
            nan_if_bad = torch.where(finite, 0.0, float("nan")).to(work.dtype)
            for mine, arrived in zip(self._sent(now), now.last.factors, strict=True):
                mine.copy_(arrived).add_(nan_if_bad)
            self._write_gradients(now, self._everything, [None] * len(work.matrices), products.p, products.q)
            return
        idle = self._idle(now)
        places = [i for i, x in enumerate(work.matrices) if len(idle[i]) < len(x.slots)]
        mean_p = [products.p[i] if now.makes_q[i] else self._keep_factor(now, i) for i in places]
        mean_q = [self._keep_factor(now, i) if now.makes_q[i] else products.q[i] for i in places]
        residuals: list[torch.Tensor | None] = [None] * len(work.matrices)
        if work.error_feedback and not work.is_whole_bucket:
            for i in places:
                residuals[i] = self._residual(now, work.matrices[i].slots[0])
        elif work.error_feedback and places:
            products.split(places, now.deltas, now.deltas, mean_p, [None])
            for slot in work.matrices[0].slots:  # the padding after the last slot keeps no residual
                if slot not in idle[0]:
                    self._residual(now, slot).copy_(self._part(now, slot))
        self._write_gradients(now, places, residuals, mean_p, mean_q)
        self._keep_residuals(now, [slot for slots in idle for slot in slots])

    def _write_gradients(
        self,
        now: BucketPass,
        places: Sequence[int],
        residuals: Residuals,
        mean_p: Tensors,
        mean_q: Tensors,
    ) -> None:
        self.products.split(places, now.deltas, residuals, mean_p, mean_q)
        for i in () if self.work.in_bucket else places:
            now.gradients[i].copy_(now.deltas[i].view(-1)[: len(now.gradients[i])])

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

    def _keep_residuals(self, now: BucketPass, slots: Sequence[Slot]) -> None:
        """Of parameters without a gradient: they follow the loss scale."""
        factor = self._factor(now)
        for slot in slots:
            if slot.name in now.residuals and factor != 1:
                now.residuals[slot.name].mul_(factor)
            slot.of(now.flat).zero_()

    # ---- delta, Q, flags -------------------------------------------------------------------------------------------

    def _load_deltas(self, now: BucketPass) -> Residuals:
        """Set `now.deltas`, per matrix n x m, and return the residuals that have not been added to them yet."""
        work = self.work
        now.deltas = []
        for own, gradient, x in zip(self.own_deltas, now.gradients, work.matrices, strict=True):
            if own is not None:
                own.view(-1)[: len(gradient)].copy_(gradient)
                own.view(-1)[len(gradient) :].zero_()
            now.deltas.append(gradient.view(x.n, x.m) if own is None else own)
        if not work.error_feedback:
            return [None] * len(now.deltas)
        if not work.is_whole_bucket:
            return [now.residuals.get(x.slots[0].name) for x in work.matrices]
        for slot in work.matrices[0].slots:
            if slot.name in now.residuals:
                self._part(now, slot).add_(now.residuals[slot.name], alpha=self._factor(now))
        return [None]

    def _part(self, now: BucketPass, slot: Slot) -> torch.Tensor:
        """The part of one parameter in the delta of a whole bucket, 1-D."""
        begin = slot.offset - self.work.matrices[0].slots[0].offset
        return now.deltas[0].view(-1)[begin : begin + slot.numel]

    def _factor(self, now: BucketPass) -> float:
        return float(now.step.residual_factor)  # `alternate` synchronises with an accelerator anyway

    def _known_q(self, now: BucketPass, matrix: Matrix, known: dict[str, torch.Tensor]) -> torch.Tensor:
        q = known.get(matrix.name)
        return self.work.draw_q(matrix, now.step.number).to(now.flat.device) if q is None else q

    def _refill(self, side: str) -> Refill:
        return functools.partial(self._refill_of, side)

    def _refill_of(self, side: str, i: int) -> torch.Tensor:
        """Drawn at each call on the CPU, where it is rarely needed; cached on accelerators, where testing for need
        would synchronise."""
        if self._on_host:
            return self.work.refill(self.work.matrices[i], side)
        if (side, i) not in self._refills:
            self._refills[side, i] = self.work.refill(self.work.matrices[i], side).to(self.work.layout.device)
        return self._refills[side, i]

    def _idle(self, now: BucketPass) -> list[list[Slot]]:
        """Per matrix the parameters that have no gradient on any rank."""
        used = (now.first.flags > 0).tolist()
        return [
            [slot for slot, has in zip(x.slots, used[places], strict=True) if not has]
            for x, places in zip(self.work.matrices, self.work.flags_of, strict=True)
        ]

    def _put_flags(self, now: BucketPass) -> None:
        slots = [slot for matrix in self.work.matrices for slot in matrix.slots]
        for slot, flag in zip(slots, now.first.flags, strict=True):
            gradient = slot.of(now.flat)
            if self._on_host:
                # The first 64 elements nearly always contain a nonzero one.
                flag.fill_(float(bool(gradient[:64].any()) or bool(gradient.any())))
            else:
                flag.copy_(gradient.any())
            put_overflow(gradient, flag)
