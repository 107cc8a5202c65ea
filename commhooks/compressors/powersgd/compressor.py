"""PowerSGD as compressors: per parameter, and per bucket.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, Algorithms 1 and 2.
"""

from collections.abc import Sequence
from typing import TypeVar, cast

import torch

from commhooks.compressors.base import RESIDUAL, StateField
from commhooks.compressors.native.choice import NativelyComputed
from commhooks.compressors.powersgd import codec, fields, native_products
from commhooks.compressors.powersgd.device_kernel import DeviceKernel, by_shape
from commhooks.compressors.powersgd.exchange import low_rank_exchange
from commhooks.compressors.powersgd.host_kernel import HostKernel
from commhooks.compressors.powersgd.matrix_plan import (
    MatrixPlan,
    memory_plan,
    packed_bytes,
    plan_bucket,
    plan_parameter,
)
from commhooks.compressors.powersgd.native_products import NativeProducts
from commhooks.compressors.powersgd.options import BatchedPowerSGD, PowerSGD
from commhooks.compressors.powersgd.torch_products import TorchProducts
from commhooks.compressors.powersgd.workspace import Matrix, Workspace
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout

AnyPowerSGD = TypeVar("AnyPowerSGD", bound=PowerSGD)
AnyKernel = HostKernel | DeviceKernel


class _LowRank(NativelyComputed[AnyPowerSGD]):
    """Common base of the per-parameter and the per-bucket form."""

    title = "PowerSGD"
    collectives = ("sum", "sum")
    native = native_products
    q: StateField = fields.Q
    exchange = staticmethod(low_rank_exchange)

    @property
    def needs_exact_step(self) -> bool:
        return not self.config.warm_start

    @property
    def stats_every(self) -> int:  # type: ignore[override]
        return max(1, self.config.compression_stats_logging_frequency)

    @property
    def summary(self) -> str:
        return f"rank {self.config.matrix_approximation_rank}"

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        return (self.q, RESIDUAL) if self.config.use_error_feedback else (self.q,)

    def initial_value(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        if field.key != "q" or not isinstance(plan, MatrixPlan):
            return None
        # The same numbers as `Workspace.draw_q` at the first step.
        purpose = "Q" if self.config.warm_start else "Q at step 0"
        return codec.draw(self.config.random_seed, plan.key, purpose, plan.rank, plan.m, dtype)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        # The plans are made by `plan`.
        packed = sum(packed_bytes(rows, self.wire_dtype) for rows in cast(Sequence[Sequence[MatrixPlan]], buckets))
        return memory_plan(cast(Sequence[MatrixPlan], plans), packed, error_feedback=self.config.use_error_feedback)

    def _new_kernel(self, layout: BucketLayout, matrices: list[Matrix]) -> AnyKernel:
        """With the buffers of one bucket."""
        on_device = not precision.is_host_readable(layout.device)
        wire_dtype = self.wire_dtype_for(layout.dtype)
        work = Workspace(layout, by_shape(matrices) if on_device else matrices, self.config, wire_dtype)
        if on_device:
            return DeviceKernel(work, stack_deltas=self.config.batch_tensors_with_same_shape)
        shapes = [(x.n, x.m, x.rank) for x in matrices]
        if not self.computes_natively(layout.device, layout.dtype):
            return HostKernel(work, TorchProducts(shapes, work.dtype))
        kernel = native_products.load(work.dtype)
        return HostKernel(work, NativeProducts(kernel, shapes, work.dtype, refills=self.q is fields.Q))


class PowerSGDCompressor(_LowRank[PowerSGD]):
    """Low-rank factors P and Q of each matrix, with error feedback and warm start: two all-reduces per bucket."""

    Config = PowerSGD

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        return plan_parameter(info, self.config)

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> AnyKernel:
        pairs = zip(layout.slots, cast(Sequence[MatrixPlan], plans), strict=True)
        matrices = [Matrix(plan.name, (slot,), plan.n, plan.m, plan.rank) for slot, plan in pairs if plan.compressed]
        return self._new_kernel(layout, matrices)


class BatchedPowerSGDCompressor(_LowRank[BatchedPowerSGD]):
    """Each bucket as one square matrix, padded with zeros."""

    Config = BatchedPowerSGD
    q = fields.BUCKET_Q

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        return [plan_bucket(parameters, self.config.matrix_approximation_rank)]

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> AnyKernel:
        (plan,) = plans
        assert isinstance(plan, MatrixPlan)
        return self._new_kernel(layout, [Matrix(plan.key, layout.slots, plan.n, plan.m, plan.rank)])
