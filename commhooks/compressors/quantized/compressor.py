"""The quantised hooks as compressors."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from commhooks.compressors.base import RESIDUAL, Compressor, Exchange, State, StateField, StepInfo, Trial
from commhooks.compressors.plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.config import Int4Compress, Int8Compress, Quantized
from commhooks.compressors.quantized.exchange import quantised_exchange
from commhooks.compressors.quantized.plan import BlockPlan, left_alone, plan_parameter
from commhooks.compressors.quantized.workspace import Workspace
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype

AnyQuantized = TypeVar("AnyQuantized", bound=Quantized)


class QuantizedCompressor(Compressor[AnyQuantized]):
    """A quantised all-reduce with error feedback: an all-to-all and an all-gather per bucket."""

    collectives = ("all_to_all", "gather")

    @property
    def code(self) -> BlockCode:
        return BlockCode(self.config.bits, self.config.block_size)

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        return (RESIDUAL,) if self.config.use_error_feedback else ()

    @property
    def words(self) -> str:
        return f"blocks of {self.config.block_size}, from step {self.start_step}"

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        made = super().plan_one(info)
        return made if isinstance(made, BlockPlan) else left_alone(info, made.reason)

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        return plan_parameter(info, self.code, self.wire_dtype_for(info.parameter.dtype))

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Workspace:
        return Workspace(
            layout,
            plans,
            self.code,
            self.wire_dtype_for(layout.dtype),
            error_feedback=self.config.use_error_feedback,
        )

    def exchange(self, flat: torch.Tensor, work: Workspace, state: State, step: StepInfo) -> Exchange:
        return quantised_exchange(flat, work, state, step)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        """`copies`: delta in blocks, and the padding of the residuals. `packed`: codes and scales as they are made,
        sent and received in both collectives, without the padding of shares."""
        quantised = [plan for plan in plans if isinstance(plan, BlockPlan) and plan.compressed]
        blocks = sum(plan.blocks * plan.block_size * compute_dtype(plan.dtype).itemsize for plan in quantised)
        beside = [plan for rows in buckets if any(p.compressed for p in rows) for plan in rows if not plan.compressed]
        plain = sum(plan.numel_sent * plan.wire_itemsize(self.wire_dtype) for plan in beside)
        packed = 4 * sum(plan.numel_sent for plan in quantised) + 4 * plain
        if not self.config.use_error_feedback:
            return MemoryPlan(packed=packed, copies=blocks)
        residual = sum(RESIDUAL.size_bytes(plan) for plan in quantised)
        return MemoryPlan(residual, packed=packed, copies=2 * blocks - residual)


class Int8Compressor(QuantizedCompressor[Int8Compress]):
    Config = Int8Compress
    title = "int8 compression"

    @classmethod
    def trials(cls, ranks: Sequence[int], options: Mapping[str, Any]) -> Sequence[Trial]:
        return (Trial("int8", {"start_iter": 0}, changes=1.2),)


class Int4Compressor(QuantizedCompressor[Int4Compress]):
    Config = Int4Compress
    title = "int4 compression"

    @classmethod
    def trials(cls, ranks: Sequence[int], options: Mapping[str, Any]) -> Sequence[Trial]:
        return (Trial("int4", {"start_iter": 0}, changes=1.6),)
