"""The gradients of some parameters of a bucket for the native kernel, with their residuals (error feedback)."""

from collections.abc import Sequence

import torch

from commhooks.compressors.native.tables import address
from commhooks.compressors.quantized.gradient_blocks import Residuals
from commhooks.compressors.quantized.native_mean import NativeAveraged, NativeDelta
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.loss_scale import LossScale, is_one
from commhooks.gradients.pieces import divide, join
from commhooks.gradients.precision import compute_dtype


class NativeGradients:
    """As `GradientBlocks`, in the bucket itself, or in a copy if the kernel does not compute in the bucket's dtype.

    Args:
        slots: the parameters, in the order of the blocks.
        error_feedback: keep residuals, flat in memory order, per parameter.

    Attributes:
        delta: gradient plus residual, then what rounding lost of it, then the averaged gradient.
    """

    def __init__(self, slots: Sequence[Slot], layout: BucketLayout, *, error_feedback: bool = True) -> None:
        self.slots = slots
        self.error_feedback = error_feedback
        self._dtype = compute_dtype(layout.dtype)
        self._in_bucket = layout.dtype == self._dtype
        numels = [slot.numel for slot in slots]
        starts = [slot.offset if self._in_bucket else sum(numels[:i]) for i, slot in enumerate(slots)]
        self._none = torch.zeros(len(slots), dtype=torch.int64)
        self._read: list[torch.Tensor | None] = []
        copy = torch.empty(0 if self._in_bucket else sum(numels), dtype=self._dtype)
        self.delta = NativeDelta(copy, list(zip(starts, numels, strict=True)), self._none)

    def form_delta(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        """delta = gradient + factor * residual, where the kernel needs it. `flat`: the bucket's buffer."""
        if self._in_bucket:
            self.delta.bucket = flat
        else:
            join(self._parts(flat), self.delta.bucket)
        self._read = [residuals.get(slot.name) if self.error_feedback else None for slot in self.slots]
        self.delta.residuals = torch.tensor([self._place(*each) for each in zip(self.slots, self._read, strict=True)])
        self.delta.factor = float(factor)

    def commit(
        self,
        averaged: NativeAveraged,
        flat: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: torch.Tensor | bool,
    ) -> None:
        """Keep what rounding lost as residuals if `good`, and write the averaged gradients into the bucket. A parameter
        without a gradient on any rank keeps its residual, and its averaged gradient is zero."""
        used = (averaged.flags > 0).tolist()
        self.delta.residuals = self._none
        if self.error_feedback and bool(good):
            self.delta.residuals = torch.tensor(
                [self._kept(slot, residuals, factor, has) for slot, has in zip(self.slots, used, strict=True)]
            )
        averaged.decode(self.delta)
        for (start, numel), has in zip(self.delta.spans, used, strict=True):
            if not has:
                self.delta.bucket[start : start + numel].zero_()
        if not self._in_bucket:
            divide(self.delta.bucket, self._parts(flat))

    def _kept(self, slot: Slot, residuals: Residuals, factor: LossScale, used: bool) -> int:
        """The address for the residual of a parameter, or 0 if the old one stays."""
        if slot.name not in residuals:
            residuals[slot.name] = torch.zeros(slot.numel, dtype=self._dtype)
        elif not used and not is_one(factor):
            residuals[slot.name].mul_(factor)
        return self._place(slot, residuals[slot.name] if used else None)

    def _place(self, slot: Slot, residual: torch.Tensor | None) -> int:
        return 0 if residual is None else address(residual, self._dtype, slot.numel)

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [slot.of(flat) for slot in self.slots]
