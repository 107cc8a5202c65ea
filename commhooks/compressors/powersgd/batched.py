"""Implement batched PowerSGD: each bucket is compressed as one square matrix, padded with zeros.

Source: `batched_powerSGD_hook` of torch.distributed. There is one residual per parameter and one Q
per bucket.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from commhooks.comm.collectives import agreement_key
from commhooks.compressors.powersgd.accelerator import AcceleratorKernel
from commhooks.compressors.powersgd.compressor import FactorField, LowRankCompressor, MatrixPlan
from commhooks.compressors.powersgd.cpu import CpuKernel, NativeProducts, Tensors, TorchProducts
from commhooks.compressors.powersgd.exchange import (
    BucketPass,
    LowRankKernel,
    Matrix,
    PowerSGDWorkspace,
)
from commhooks.compressors.powersgd.options import BatchedPowerSGD
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.loss_scale import chosen, is_one


class BucketQ(FactorField):
    def refit(
        self, value: torch.Tensor, plan: UnitPlan, initial: torch.Tensor | None
    ) -> torch.Tensor | None:
        if value.shape[1] != self.shape(plan)[1]:
            return None
        return super().refit(value, plan, initial)

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        # Until DDP has built its buckets the size of the matrix is unknown. `refit` discards a Q of
        # another size.
        return None


class BatchedCpuKernel(CpuKernel):
    """Implements `LowRankKernel` for the single matrix of a bucket."""

    def __init__(self, work: PowerSGDWorkspace, products: TorchProducts | NativeProducts) -> None:
        super().__init__(work, products)
        self.largest = None  # `products.largest` is a single number for the whole bucket

    def add_residuals(self, bucket: BucketPass) -> None:
        factor = float(bucket.step.residual_factor)
        for slot in self.work.slots:
            if slot.name in bucket.residuals:
                self._part(bucket, slot).add_(bucket.residuals[slot.name], alpha=factor)

    def form_q(self, bucket: BucketPass) -> None:
        for slot in self.used(bucket)[1]:
            self._part(bucket, slot).zero_()
        super().form_q(bucket)

    def residuals_to_write(
        self, bucket: BucketPass, places: Sequence[int], idle: Sequence[Slot]
    ) -> Tensors | None:
        self.products.reconstruct(places, bucket.deltas, bucket.deltas, None)
        for slot in self.work.slots:  # the padding after the last slot has no residual
            if slot not in idle:
                self.residual(bucket, slot).copy_(self._part(bucket, slot))
        return None

    def _part(self, bucket: BucketPass, slot: Slot) -> torch.Tensor:
        begin = slot.offset - self.work.slots[0].offset
        return bucket.deltas[0].view(-1)[begin : begin + slot.numel]


class BatchedAcceleratorKernel(AcceleratorKernel):
    """Implements `LowRankKernel` for the single matrix of a bucket.

    `parts`: the number of elements of each parameter, then of the padding.
    """

    def __init__(self, work: PowerSGDWorkspace, *, stack_deltas: bool) -> None:
        super().__init__(work, stack_deltas=stack_deltas)
        self._size = work.matrices[0].n * work.matrices[0].m
        parts = [*(slot.numel for slot in work.slots), self._size - work.layout.numel]
        self.parts = torch.tensor(parts).to(work.layout.device)

    def find_largest(self, bucket: BucketPass) -> None:
        for slot, out in zip(self.work.slots, self.largest, strict=True):
            if slot.numel:
                gradient = bucket.deltas[0].view(-1)[slot.offset : slot.stop]
                torch.linalg.vector_norm(gradient, float("inf"), out=out)
            else:
                out.zero_()

    def used(self, bucket: BucketPass) -> torch.Tensor:
        used = bucket.first.flags > 0
        used_parts = torch.cat([used, used.new_zeros(1)])
        elements = used_parts.repeat_interleave(self.parts, output_size=self._size)
        bucket.used_elements = elements.view(self.blocks[0].shape)
        return used.any().view(1)

    def form_q(self, bucket: BucketPass) -> None:
        bucket.deltas[0].mul_(bucket.used_elements)
        super().form_q(bucket)

    def reconstruct(
        self, bucket: BucketPass, good: torch.Tensor | bool, finite: torch.Tensor
    ) -> None:
        super().reconstruct(bucket, good, finite)
        (gradient,) = bucket.gradients
        gradient.mul_(bucket.used_elements.view(-1)[: len(gradient)])

    def keep_residuals(self, bucket: BucketPass, good: torch.Tensor) -> None:
        ((delta, residual),) = zip(bucket.deltas, self.bound_residuals(bucket), strict=True)
        factor = chosen(good, bucket.step.residual_factor, 1.0)
        if not is_one(factor):
            residual.mul_(factor)
        # the padding has no residual
        torch.where(good & bucket.used_elements, delta, residual, out=residual)


class BatchedPowerSGDCompressor(LowRankCompressor[BatchedPowerSGD]):
    Config = BatchedPowerSGD
    q = BucketQ("q", per="bucket")
    Cpu = BatchedCpuKernel
    Accelerator = BatchedAcceleratorKernel

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        numel = sum(info.numel for info in parameters)
        dtype = parameters[0].parameter.dtype
        # DDP passes a complex bucket as real numbers
        dtype = dtype.to_real() if dtype.is_complex else dtype
        side = square_side(numel)
        rank = min(side, self.config.matrix_approximation_rank)
        first, last = parameters[0].name, parameters[-1].name
        label = f"bucket {first} .. {last} ({len(parameters)} parameters)"
        if len(parameters) == 1:
            label = first
        sparse = any(info.sparse for info in parameters)
        # The key identifies the sequence of parameters: a bucket of other parameters forms another
        # matrix.
        key = f"batched.{agreement_key([info.name for info in parameters]):016x}"
        plan = MatrixPlan(label, (numel,), numel, dtype, state_name=key, lowered=not sparse)
        if sparse:
            return [replace(plan, reason="sparse gradient")]
        if any(info.parameter.is_complex() for info in parameters):
            return [replace(plan, reason="complex numbers")]
        if 2 * side * rank >= numel:
            return [replace(plan, reason="too small")]
        return [replace(plan, compressed=True, flags=len(parameters), n=side, m=side, rank=rank)]

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> LowRankKernel:
        (plan,) = plans
        assert isinstance(plan, MatrixPlan)
        return self.kernel(layout, [Matrix(plan.key, layout.slots, plan.n, plan.m, plan.rank)])


def square_side(numel: int) -> int:
    return math.isqrt(max(numel - 1, 0)) + 1 if numel else 0
