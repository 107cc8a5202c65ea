"""Implement hooks without learned state: all-reduce, in 16 bits or not, and no communication."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commhooks.comm.packing import WIRE_DTYPES
from commhooks.compressors.base import Compressor, Exchange, Send, State, StepInfo
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.options import ConfigT, HookConfig


@dataclass(frozen=True, kw_only=True)
class AllReduce(HookConfig):
    """Averages gradients as DDP does without a hook: the baseline."""

    hook_name: ClassVar[str] = "allreduce"


@dataclass(frozen=True, kw_only=True)
class FP16Compress(HookConfig):
    """Sends gradients as float16. Values beyond 65504 become inf."""

    hook_name: ClassVar[str] = "fp16_compress"
    aliases: ClassVar[tuple[str, ...]] = ("fp16",)
    own_wire: ClassVar[str | None] = "fp16"


@dataclass(frozen=True, kw_only=True)
class BF16Compress(HookConfig):
    """Sends gradients as bfloat16: the range of float32 with 8 bits of precision."""

    hook_name: ClassVar[str] = "bf16_compress"
    aliases: ClassVar[tuple[str, ...]] = ("bf16",)
    own_wire: ClassVar[str | None] = "bf16"


@dataclass(frozen=True, kw_only=True)
class Noop(HookConfig):
    """Sends nothing: for measurements only.

    It shows how fast training would be without a network. Replicas drift apart.
    """

    hook_name: ClassVar[str] = "noop"
    sends: ClassVar[bool] = False


class Stateless(Compressor[ConfigT]):
    transactional = False
    computes_from_received = False

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        return UnitPlan.uncompressed(info, f"hook {self.name}")

    def memory_plan(
        self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        wire = self.wire_dtype
        sent = [
            plan
            for plan in plans
            if self.config.sends and plan.wire_itemsize(wire) < plan.wire_itemsize(None)
        ]
        return MemoryPlan(packed=sum(plan.numel_sent * plan.wire_itemsize(wire) for plan in sent))


class Cast(Stateless[ConfigT]):
    def __init__(self, config: ConfigT, wire_dtype: torch.dtype | None = None) -> None:
        hook_dtype = None if self.Config.own_wire is None else WIRE_DTYPES[self.Config.own_wire]
        super().__init__(config, hook_dtype if wire_dtype is None else wire_dtype)
        self._casts = [dtype for dtype in (wire_dtype, hook_dtype) if dtype is not None]

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        # Cast before dividing, as torch does. Sparse gradients keep their dtype. With a wrapper
        # there are two casts.
        wider: list[torch.Tensor] = []
        low = flat
        for dtype in () if flat.is_sparse else self._casts:
            if low.dtype != dtype:
                wider.append(low)
                low = low.to(dtype)
        low.div_(step.world_size)
        reduced: torch.Tensor = yield Send(low, last=True)
        for buffer in reversed(wider):
            reduced = buffer.copy_(reduced)
        return reduced


class AllReduceCompressor(Cast[AllReduce]):
    Config = AllReduce
    title = "all-reduce"


class FP16Compressor(Cast[FP16Compress]):
    Config = FP16Compress
    title = "fp16 compression"


class BF16Compressor(Cast[BF16Compress]):
    Config = BF16Compress
    title = "bf16 compression"


class NoopCompressor(Stateless[Noop]):
    Config = Noop
    title = "no communication"

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        if self.wire_dtype is None or flat.is_sparse:
            return flat
        return flat.copy_(flat.to(self.wire_dtype))
        yield  # a generator that sends nothing


COMPRESSOR_PATHS: dict[type[HookConfig], str] = {
    AllReduce: "commhooks.compressors.cast:AllReduceCompressor",
    FP16Compress: "commhooks.compressors.cast:FP16Compressor",
    BF16Compress: "commhooks.compressors.cast:BF16Compressor",
    Noop: "commhooks.compressors.cast:NoopCompressor",
}
