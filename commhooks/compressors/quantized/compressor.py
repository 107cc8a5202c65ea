"""The quantised hooks as compressors."""

from collections.abc import Sequence
from typing import TypeVar

from commhooks.compressors.base import RESIDUAL, StateField
from commhooks.compressors.native.choice import NAME, NativelyComputed
from commhooks.compressors.quantized import native_blocks
from commhooks.compressors.quantized.block_plan import BlockPlan, plan_parameter
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.exchange import Workspace, quantised_exchange
from commhooks.compressors.quantized.options import Int4Compress, Int8Compress, Quantized
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype

AnyQuantized = TypeVar("AnyQuantized", bound=Quantized)


class QuantizedCompressor(NativelyComputed[AnyQuantized]):
    """A quantised all-reduce with error feedback: an all-to-all and an all-gather per bucket."""

    collectives = ("all_to_all", "gather")
    computes_from_received = False  # a code times its scale
    native = native_blocks
    exchange = staticmethod(quantised_exchange)

    @property
    def code(self) -> BlockCode:
        return BlockCode(self.config.bits, self.config.block_size)

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        return (RESIDUAL,) if self.config.use_error_feedback else ()

    @property
    def summary(self) -> str:
        return f"blocks of {self.config.block_size}"

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        return plan_parameter(info, self.code, self.wire_dtype_for(info.parameter.dtype))

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Workspace:
        natively = precision.is_host_readable(layout.device) and self.computes_natively(layout.device, layout.dtype)
        return Workspace(
            layout,
            plans,
            self.code,
            self.wire_dtype_for(layout.dtype),
            error_feedback=self.config.use_error_feedback,
            natively=natively,
        )

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        """`copies`: with torch delta in blocks, and the padding of the residuals; with the native kernel delta, where
        the gradients have 16 bits. `packed`: codes and scales as they are made (with torch), sent and received in both
        collectives, without the padding of shares."""
        natively = self.kernel.name == NAME
        quantised = [plan for plan in plans if isinstance(plan, BlockPlan) and plan.compressed]
        residual = sum(RESIDUAL.size_bytes(plan) for plan in quantised) if self.config.use_error_feedback else 0
        sent = [plan for rows in buckets if any(p.compressed for p in rows) for plan in rows if not plan.compressed]
        plain = sum(plan.numel_sent * plan.wire_itemsize(self.wire_dtype) for plan in sent)
        packed = (3 if natively else 4) * sum(plan.numel_sent for plan in quantised) + 4 * plain
        if natively:
            converted = [plan for plan in quantised if compute_dtype(plan.dtype) != plan.dtype]
            copies = sum(plan.numel * compute_dtype(plan.dtype).itemsize for plan in converted)
        else:
            blocks = sum(plan.blocks * plan.block_size * compute_dtype(plan.dtype).itemsize for plan in quantised)
            copies = 2 * blocks - residual if self.config.use_error_feedback else blocks
        return MemoryPlan(residual, packed=packed, copies=copies)


class Int8Compressor(QuantizedCompressor[Int8Compress]):
    Config = Int8Compress
    title = "int8 compression"


class Int4Compressor(QuantizedCompressor[Int4Compress]):
    Config = Int4Compress
    title = "int4 compression"
