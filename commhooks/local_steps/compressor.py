"""DiLoCo and local SGD as compressors, whose exchange is the outer step of a buffer of weights."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from commhooks.compressors.base import RESIDUAL, Compressor, Exchange, State, StateField, StepInfo
from commhooks.compressors.quantized.compressor import Int4Compressor, Int8Compressor
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.errors import HookConfigError
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype
from commhooks.local_steps.options import DiLoCo, LocalSGD, LocalSteps
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM, OuterStepWorkspace, outer_step

AnyLocalSteps = TypeVar("AnyLocalSteps", bound=LocalSteps)
_QUANTISED: dict[str, type[Compressor[Any]]] = {"int8": Int8Compressor, "int4": Int4Compressor}


@dataclass(frozen=True)
class WeightPlan(UnitPlan):
    """The plan of a parameter's weights, which always counts as compressed.

    Attributes:
        on_wire: the plan by which the differences are sent in an outer step.
        every: H, the steps of a round.
    """

    on_wire: UnitPlan = field(kw_only=True)
    every: int = field(kw_only=True)

    def sent_bytes(self, wire_dtype: torch.dtype | None) -> int:
        """Bytes per rank and step, averaged over a round."""
        return -(-self.on_wire.sent_bytes(None) // self.every)


class LocalStepsCompressor(Compressor[AnyLocalSteps]):
    """Base of both compressors. `driver.py` decides when an outer step runs."""

    wrappers = False
    computes_from_received = False

    def __init__(self, config: AnyLocalSteps, wire_dtype: torch.dtype | None = None) -> None:
        super().__init__(config, wire_dtype)
        quantised = _QUANTISED.get(config.wire)
        self._wire = None if quantised is None else quantised(quantised.Config(exclude=list(config.excluded_globs)))
        if self._wire is not None:
            self.collectives = self._wire.collectives

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        of_wire = () if self._wire is None else (dataclasses.replace(RESIDUAL, scales_with_loss=False),)
        return ANCHOR, *((MOMENTUM,) if self.config.outer_momentum else ()), *of_wire

    @property
    def summary(self) -> str:
        return f"every {self.config.sync_every} steps"

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        p = info.parameter
        if p.is_complex():
            raise HookConfigError(f"hook {self.name!r}: {info.name} is complex, and only real weights can be averaged")
        kept = dataclasses.replace(info, sparse=False)  # the gradient may be sparse, the weights are not
        on_wire = UnitPlan.uncompressed(kept, "") if self._wire is None else self._wire.plan_one(kept)
        on_wire = dataclasses.replace(on_wire, dtype=compute_dtype(p.dtype))
        return WeightPlan(
            info.name,
            tuple(p.shape),
            info.numel,
            p.dtype,
            compressed=True,
            numel_compressed=info.numel,
            on_wire=on_wire,
            every=self.config.sync_every,
        )

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> OuterStepWorkspace:
        on_wire = [plan.on_wire for plan in plans if isinstance(plan, WeightPlan)]
        if self._wire is None or not any(each.compressed for each in on_wire):
            return OuterStepWorkspace(layout, None, None)
        self._wire.native = self.native
        return OuterStepWorkspace(layout, self._wire, self._wire.workspace(layout, on_wire))

    def exchange(self, flat: torch.Tensor, work: OuterStepWorkspace, state: State, step: StepInfo) -> Exchange:
        return outer_step(flat, work, state, step, self.config.outer_lr, self.config.outer_momentum)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        """`copies` are the weights in an outer step, twice with a delay."""
        on_wire = [plan.on_wire for plan in plans if isinstance(plan, WeightPlan)]
        weights = sum(each.numel * each.dtype.itemsize for each in on_wire)
        sending = MemoryPlan()
        if self._wire is not None:
            self._wire.native = self.native
            sending = self._wire.memory_plan(on_wire, [on_wire])
        exchanged = weights // self.config.fragments * (2 if self.config.delay else 1)
        kept = weights * (2 if self.config.outer_momentum else 1)
        return MemoryPlan(sending.residual, kept, sending.packed, copies=exchanged + sending.copies)

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.config.delay and device.type != "cpu":
            raise HookConfigError(
                f"hook {self.name!r} with delay={self.config.delay} works where the model is on the CPU, and not on "
                f"{device}: use delay=0"
            )

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        return "" if self._wire is None else self._wire.native_build(device, dtype)


class DiLoCoCompressor(LocalStepsCompressor[DiLoCo]):
    Config = DiLoCo
    title = "DiLoCo"


class LocalSGDCompressor(LocalStepsCompressor[LocalSGD]):
    Config = LocalSGD
    title = "local SGD"
