"""Averaging in the bucket's dtype or in 16 bits: one all-reduce per bucket, no learned state. The hook call returns at
once, unless ranks form nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commhooks.comm.wire import WIRE_DTYPES
from commhooks.compressors.base import Compressor, Exchange, Send, State, StepInfo
from commhooks.compressors.config import ConfigT, HookConfig
from commhooks.compressors.plan import MemoryPlan, ParameterInfo, UnitPlan


@dataclass(frozen=True, kw_only=True)
class AllReduce(HookConfig):
    """Plain averaging of gradients, as DDP does without a hook: the baseline, with statistics."""

    hook_name: ClassVar[str] = "allreduce"


@dataclass(frozen=True, kw_only=True)
class FP16Compress(HookConfig):
    """Gradients travel as float16: half the bytes. Values beyond 65504 become inf, as a GradScaler expects."""

    hook_name: ClassVar[str] = "fp16_compress"
    aliases: ClassVar[tuple[str, ...]] = ("fp16",)
    own_wire: ClassVar[str | None] = "fp16"


@dataclass(frozen=True, kw_only=True)
class BF16Compress(HookConfig):
    """Gradients travel as bfloat16: half the bytes, the range of float32, 8 bits of precision."""

    hook_name: ClassVar[str] = "bf16_compress"
    aliases: ClassVar[tuple[str, ...]] = ("bf16",)
    own_wire: ClassVar[str | None] = "bf16"


class Stateless(Compressor[ConfigT]):
    """Base of the compressors without learned state that treat all parameters of a bucket alike."""

    transactional = False
    selective = False
    computes_from_received = False

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        return UnitPlan.left_alone(info, f"hook {self.name}")

    def lowered(self, dtype: torch.dtype) -> Compressor[Any]:
        return Lowered(self, dtype)

    def computes(self, plan: UnitPlan) -> bool:
        return plan.wire_itemsize(self.wire_dtype) < plan.wire_itemsize(None)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        narrowed = filter(self.computes, plans if self.config.sends else ())
        return MemoryPlan(packed=sum(p.numel_sent * p.wire_itemsize(self.wire_dtype) for p in narrowed))


class Cast(Stateless[ConfigT]):
    """The mean over the ranks, in the bucket's dtype or in a narrower one."""

    def __init__(self, config: ConfigT, wire_dtype: torch.dtype | None = None) -> None:
        own = self.Config.own_wire
        super().__init__(config, wire_dtype if own is None else WIRE_DTYPES[own])

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        # Cast before dividing, as torch does. Gradients of sparse embeddings keep their dtype.
        low = flat if self.wire_dtype is None or flat.is_sparse else flat.to(self.wire_dtype)
        low.div_(step.world_size)
        reduced: torch.Tensor = yield Send(low, last=True)
        return reduced if low is flat else flat.copy_(reduced)


class AllReduceCompressor(Cast[AllReduce]):
    Config = AllReduce
    title = "all-reduce"


class FP16Compressor(Cast[FP16Compress]):
    Config = FP16Compress
    title = "fp16 compression"


class BF16Compressor(Cast[BF16Compress]):
    Config = BF16Compress
    title = "bf16 compression"


class Lowered(Stateless[Any]):
    """A compressor without learned state behind a wrapper that casts the bucket to a narrower dtype."""

    def __init__(self, inner: Compressor[Any], dtype: torch.dtype) -> None:
        super().__init__(inner.config, dtype)
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        if flat.is_sparse or flat.dtype == self.wire_dtype:
            return (yield from self._inner.exchange(flat, work, state, step))
        low = flat.to(self.wire_dtype)
        reduced = yield from self._inner.exchange(low, work, state, step)
        return flat.copy_(low if reduced is None else reduced)
