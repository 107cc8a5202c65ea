"""PowerSGD as compressors: per parameter, and per bucket.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, Algorithms 1 and 2.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from commhooks.comm.collective import Op
from commhooks.comm.wire import WRAPPERS
from commhooks.compressors.base import RESIDUAL, Compressor, StateField
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
from commhooks.compressors.powersgd.message import InBlocks
from commhooks.compressors.powersgd.native_products import NativeProducts
from commhooks.compressors.powersgd.options import BatchedPowerSGD, PowerSGD
from commhooks.compressors.powersgd.quantised_plan import quantised_bytes, quantised_plan
from commhooks.compressors.powersgd.torch_products import TorchProducts
from commhooks.compressors.powersgd.workspace import Matrix, Workspace
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.exchange import Workspace as OnlyBlocks
from commhooks.compressors.quantized.torch_kernel import residual_memory
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout, Slot

AnyPowerSGD = TypeVar("AnyPowerSGD", bound=PowerSGD)
AnyKernel = HostKernel | DeviceKernel
BLOCK_SIZE = 64
"""Elements of a block with the wrappers that quantise. Factors and vectors are short, and each begins a new block."""


class _LowRank(NativelyComputed[AnyPowerSGD]):
    """Common base of the per-parameter and the per-bucket form."""

    title = "PowerSGD"
    wrappers = WRAPPERS
    Plan = MatrixPlan
    native = native_products
    exchange = staticmethod(low_rank_exchange)

    def __init__(
        self, config: AnyPowerSGD, wire_dtype: torch.dtype | None = None, code: BlockCode | None = None
    ) -> None:
        """
        Args:
            code: how a wrapper quantises what is sent; None: not at all.
        """
        super().__init__(config, wire_dtype)
        self.code = code

    def quantised(self, bits: int) -> "Compressor[Any]":
        return type(self)(self.config, code=BlockCode(bits, BLOCK_SIZE))

    @property
    def wire(self) -> str:
        return super().wire if self.code is None else f"int{self.code.bits}"

    @property
    def needs_exact_step(self) -> bool:
        return not self.config.warm_start

    @property
    def collectives(self) -> Sequence[Op]:  # type: ignore[override]
        message: tuple[Op, ...] = ("sum",) if self.code is None else ("all_to_all", "gather")
        return message if self.config.alternate else (*message, *message)

    @property
    def stats_every(self) -> int:  # type: ignore[override]
        return max(1, self.config.compression_stats_logging_frequency)

    @property
    def words(self) -> str:
        return f"{self.config.rank_words}, from step {self.start_step}"

    @property
    def phrase(self) -> str:
        return f"{self.title} at {self.config.rank_words}"

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        """Q, P with `alternate`, and the residual with error feedback."""
        q = fields.BUCKET_Q if self.per_bucket else fields.Q
        kept = (q, fields.P) if self.config.alternate else (q,)
        return (*kept, RESIDUAL) if self.config.use_error_feedback else kept

    def initial_value(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        if field.key != "q" or not isinstance(plan, MatrixPlan):
            return None
        # The same numbers as `Workspace.draw_q` at the first step.
        purpose = "Q" if self.config.warm_start else "Q at step 0"
        return codec.draw(self.config.random_seed, plan.key, purpose, plan.rank, plan.m, dtype)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        packed = sum(
            packed_bytes(rows, self.wire_dtype) if self.code is None else quantised_bytes(rows, self.code)
            for rows in cast(Sequence[Sequence[MatrixPlan]], buckets)  # made by `plan`
        )
        return memory_plan(cast(Sequence[MatrixPlan], plans), packed, error_feedback=self.config.use_error_feedback)

    def _new_kernel(self, layout: BucketLayout, matrices: list[Matrix], direct: Sequence[Slot] = ()) -> AnyKernel:
        """With the buffers of one bucket."""
        on_device = not precision.is_host_readable(layout.device) and not self.config.alternate
        wire_dtype, in_blocks = self.wire_dtype_for(layout.dtype), None
        if self.code is not None:
            dtype = precision.compute_dtype(layout.dtype)
            residuals = residual_memory(direct, self.code, dtype, layout.device)
            # An element of P Q^T, a sum of r products, has to fit into the bucket.
            largest = torch.finfo(layout.dtype).max / math.sqrt(max(x.rank for x in matrices))
            in_blocks = InBlocks(self.code, direct, residuals, wire_dtype, largest)
            wire_dtype = dtype  # quantised on the way
        work = Workspace(layout, by_shape(matrices) if on_device else matrices, self.config, wire_dtype, in_blocks)
        if on_device:
            return DeviceKernel(work, stack_deltas=self.config.batch_tensors_with_same_shape)
        shapes = [(x.n, x.m, x.rank) for x in matrices]
        if not self.computes_natively(layout.device, layout.dtype):
            return HostKernel(work, TorchProducts(shapes, work.dtype, layout.device))
        refills = not (self.config.alternate or self.per_bucket)
        return HostKernel(work, NativeProducts(native_products.load(work.dtype), shapes, work.dtype, refills=refills))


class PowerSGDCompressor(_LowRank[PowerSGD]):
    """Low-rank factors P and Q of each matrix, with error feedback and warm start: two all-reduces per bucket."""

    Config = PowerSGD

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        made = plan_parameter(info, self.config)
        if self.code is None:
            return made
        return quantised_plan(made, self.code, as_it_is=self.config.use_error_feedback)

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> AnyKernel | OnlyBlocks:
        pairs = list(zip(layout.slots, cast(Sequence[MatrixPlan], plans), strict=True))
        matrices = [Matrix(plan.name, (slot,), plan.n, plan.m, plan.rank) for slot, plan in pairs if plan.rank]
        if matrices:
            direct = [slot for slot, plan in pairs if plan.compressed and not plan.rank]
            return self._new_kernel(layout, matrices, direct)
        assert self.code is not None
        return OnlyBlocks(layout, plans, self.code, self.wire_dtype_for(layout.dtype), error_feedback=True)


class BatchedPowerSGDCompressor(_LowRank[BatchedPowerSGD]):
    """Each bucket as one square matrix, padded with zeros."""

    Config = BatchedPowerSGD
    per_bucket = True

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        rank = self.config.rank_for(None)
        assert rank is not None  # the config takes no globs
        made = plan_bucket(parameters, rank)
        return [made if self.code is None else quantised_plan(made, self.code, as_it_is=False)]

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> AnyKernel:
        (plan,) = plans
        assert isinstance(plan, MatrixPlan)
        return self._new_kernel(layout, [Matrix(plan.key, layout.slots, plan.n, plan.m, plan.rank)])
