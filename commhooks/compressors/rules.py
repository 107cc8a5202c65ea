"""What the engine, plans and messages ask of a compressor beside what its author defines (`base.py`).

The defaults suit every compressor; our own ones refine them: kernels, wrappers, whole buckets.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic

import torch

from commhooks.comm.wire import wire_dtype_of
from commhooks.compressors.state_field import StateField
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan, real_itemsize
from commhooks.errors import HookConfigError
from commhooks.options import ConfigT


class CompressorRules(ABC, Generic[ConfigT]):
    """
    Attributes:
        computes_from_received: what it computes from what it has received may differ between kinds of processors in
            the last bits, so that replicas on such machines drift apart. False: one correctly rounded operation on
            each number alone, which gives the same bits everywhere.
        selective: it decides per parameter whether to compress; plans then show the reasons.
        per_bucket: it compresses whole buckets, so its plan is unknown until DDP has built its buckets.
        stats_every: steps between two log lines with compression statistics; None: no such lines.
        wrappers: whether the fp16 and bf16 wrappers can be used; see `lowered`.
        flat_only: it works where all ranks compress all of every parameter: neither between nodes only, nor on shards.
        judges_averages: buckets that the engine averages for it are read, to see whether they are finite. False: what
            is in them does not matter for what it has learned, and they count as finite.
        name: `Config.hook_name`.
        Plan: the class of its plans, for the parameters that are never offered to `plan_parameter`.
        native: compute with the native library. The engine sets it before it asks for a workspace: all ranks have the
            same `native_build`.
    """

    computes_from_received: ClassVar[bool] = True
    selective: ClassVar[bool] = True
    per_bucket: ClassVar[bool] = False
    wrappers: ClassVar[bool] = True
    flat_only: ClassVar[bool] = False
    stats_every: int | None = None
    native: bool = False
    judges_averages: bool = True
    Plan: ClassVar[type[UnitPlan]] = UnitPlan
    name: ClassVar[str]

    # See `Compressor`.
    Config: ClassVar[type[Any]]
    title: ClassVar[str]
    state_fields: Sequence[StateField]
    config: ConfigT
    wire_dtype: torch.dtype | None

    @abstractmethod
    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        """See `Compressor`."""

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise HookConfigError if this machine cannot compress gradients of `dtype` on `device`."""

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        """What tells this machine's native kernels for gradients of `dtype` on `device` apart from others that compute
        other bits; "" if it has none. Raises HookConfigError with the reason if it should have some."""
        return ""

    @classmethod
    def not_between_nodes(cls) -> str:
        """Why it cannot work between nodes only, to follow "which"; "" if it can."""
        if not cls.Config.sends:
            return "sends nothing"
        if cls.flat_only:
            return "measures ranks that all compress the whole model"
        return "compresses whole buckets" if cls.per_bucket else ""

    @property
    def start_step(self) -> int:
        """Number of committed steps of training before compression begins."""
        start = self.config.configured_start
        assert isinstance(start, int)
        return start

    @property
    def display_name(self) -> str:
        """Display name in messages."""
        return self.title or self.name

    @property
    def summary(self) -> str:
        """The main options, for the summary at the first backward pass; "" for none."""
        return ""

    def plan(self, parameters: Sequence[ParameterInfo]) -> list[UnitPlan]:
        """Decide for the parameters of a bucket or of a model: one plan each, in order."""
        return [self.plan_one(info) for info in parameters]

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        """Leave sparse, excluded, complex and empty parameters uncompressed; call `plan_parameter` for the others."""
        because = None
        if info.sparse:
            because = "sparse gradient"
        elif info.excluded_by is not None:
            because = f"excluded by {info.excluded_by!r}"
        elif info.parameter.is_complex():
            because = "complex numbers"
        elif info.parameter.numel() == 0:
            because = "empty"
        if because is not None:
            return self.Plan.uncompressed(info, because)
        plan: object = self.plan_parameter(info)
        if not isinstance(plan, UnitPlan):
            raise HookConfigError(
                f"{type(self).__name__}.plan_parameter returned {plan!r} for {info.name}; expected a UnitPlan, such as "
                'UnitPlan.uncompressed(info, "why not")'
            )
        return plan

    def lowered(self, dtype: torch.dtype) -> Any:
        """A copy that sends `dtype` where that is narrower, for the fp16 and bf16 wrappers."""
        kind: Any = type(self)
        return kind(self.config, dtype)

    def with_start(self, start: int) -> Any:
        """A copy with another start step."""
        made = copy.copy(self)  # whatever arguments its class takes
        made.config = self.config.with_start(start)
        return made

    @property
    def begins(self) -> int:
        """The step at which compression begins, as far as it is known."""
        return self.start_step

    @property
    def how_to_begin_earlier(self) -> str:
        """The remedy for a training that ends before `begins`."""
        return f"Set {self.config.start_option} to a smaller number"

    def may_compress(self, infos: Sequence[ParameterInfo]) -> list[bool]:
        """Whether each parameter could come to be compressed, and have a residual, with these options."""
        return [plan.compressed for plan in self.plan(infos)]

    def wire_dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that is sent for a bucket of `dtype`."""
        return wire_dtype_of(dtype, self.wire_dtype)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        """Bytes needed on each rank. `buckets`: the same plans grouped by bucket; one group if buckets are unknown."""
        residual = others = 0
        for plan in plans:
            for each in self.state_fields if plan.compressed else ():
                size = each.size_bytes(plan)
                residual, others = (residual, others + size) if each.replicated else (residual + size, others)
        packed = sum(plan.numel_sent * plan.wire_itemsize(self.wire_dtype) for plan in plans if plan.compressed)
        copies = sum(plan.numel * max(4, real_itemsize(plan.dtype)) for plan in plans if plan.compressed)
        return MemoryPlan(residual, others, packed, copies=copies)
