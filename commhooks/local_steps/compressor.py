"""Define DiLoCo and local SGD as compressors whose exchange is the outer step of a buffer of
weights.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from commhooks.compressors.base import RESIDUAL, Compressor, Exchange, State, StateField, StepInfo
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.errors import HookConfigError, invalid
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype
from commhooks.local_steps import flat_weights
from commhooks.local_steps.options import DiLoCo, LocalSGD, LocalSteps
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM, OuterStepWorkspace, outer_step
from commhooks.registry import compressor_named

AnyLocalSteps = TypeVar("AnyLocalSteps", bound=LocalSteps)
_HOOKS = {"int8": "int8_compress", "int4": "int4_compress"}
"""The hooks that send the differences of weights, by `wire`; "float32" needs none."""


@dataclass(frozen=True)
class WeightPlan(UnitPlan):
    """Plans a parameter's weights, which always count as compressed. `on_wire` plans how weight
    differences are sent in an outer step, and `every` is H, the number of steps in a round.
    """

    on_wire: UnitPlan = field(kw_only=True)
    every: int = field(kw_only=True)
    offloaded: bool = field(kw_only=True)

    def sent_bytes(self, wire_dtype: torch.dtype | None) -> int:
        """Return the bytes per rank and step, averaged over a round."""
        return -(-self.on_wire.sent_bytes(None) // self.every)


class LocalStepsCompressor(Compressor[AnyLocalSteps]):
    """Base of both compressors. `driver.py` decides when an outer step runs."""

    wrappers = False
    computes_from_received = False

    def __init__(self, config: AnyLocalSteps, wire_dtype: torch.dtype | None = None) -> None:
        super().__init__(config, wire_dtype)
        self._wire = None
        if config.wire in _HOOKS:
            quantised = compressor_named(_HOOKS[config.wire])
            if quantised is None:
                raise invalid(
                    f"{type(config).__name__}: wire",
                    config.wire,
                    f"'float32': this build of commhooks lacks the hook {_HOOKS[config.wire]}",
                )
            self._wire = quantised(quantised.Config(exclude=list(config.excluded_globs)))
            self.collectives = self._wire.collectives

    @property
    def state_fields(self) -> tuple[StateField, ...]:  # type: ignore[override]
        of_wire = (
            () if self._wire is None else (dataclasses.replace(RESIDUAL, scales_with_loss=False),)
        )
        return ANCHOR, *((MOMENTUM,) if self.config.outer_momentum else ()), *of_wire

    @property
    def summary(self) -> str:
        return f"every {self.config.sync_every} steps"

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        p = info.parameter
        if p.is_complex():
            raise HookConfigError(
                f"hook {self.name!r}: {info.name} is complex, and only real weights can be averaged"
            )
        # the gradient may be sparse, the weights are not
        kept = dataclasses.replace(info, sparse=False)
        on_wire = (
            UnitPlan.uncompressed(kept, "") if self._wire is None else self._wire.plan_one(kept)
        )
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
            offloaded=self.offloads(p.device),
        )

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> OuterStepWorkspace:
        on_wire = [plan.on_wire for plan in plans if isinstance(plan, WeightPlan)]
        if self._wire is not None:
            self._wire.native = self.native
        wire = self._wire if any(plan.compressed for plan in on_wire) else None
        return OuterStepWorkspace(layout, on_wire, wire, self.offloads(layout.device))

    def offloads(self, device: torch.device) -> bool:
        return (
            self.config.offload is not False
            and device.type != "meta"
            and not precision.is_host_readable(device)
        )

    def exchange(
        self, flat: torch.Tensor, work: OuterStepWorkspace, state: State, step: StepInfo
    ) -> Exchange:
        return outer_step(flat, work, state, step, self.config.outer_lr, self.config.outer_momentum)

    def memory_plan(
        self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        """Count in `copies` the weights of the two buffers that are exchanged at a time (with a
        delay the weights of a fragment, twice), and their anchor and momentum if these are kept in
        host memory.
        """
        of_weights = [plan for plan in plans if isinstance(plan, WeightPlan)]
        on_wire = [plan.on_wire for plan in of_weights]
        sizes = [plan.numel * plan.dtype.itemsize for plan in on_wire]
        weights, kept = sum(sizes), sum(sizes) * (2 if self.config.outer_momentum else 1)
        sending = MemoryPlan()
        if self._wire is not None:
            self._wire.native = self.native
            sending = self._wire.memory_plan(on_wire, [on_wire])
        if self.config.delay:
            share, copied = 1 / self.config.fragments, 2
        else:
            share, copied = (
                min(1.0, 2 * max(flat_weights.BUFFER_BYTES, *sizes, 0) / max(1, weights)),
                1,
            )
        offloaded = any(plan.offloaded for plan in of_weights)
        copies = share * (weights * copied + kept * offloaded + sending.copies)
        return MemoryPlan(
            sending.residual,
            0 if offloaded else kept,
            int(share * sending.packed),
            copies=int(copies),
            host=kept if offloaded else 0,
        )

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        return "" if self._wire is None else self._wire.native_build(device, dtype)


class DiLoCoCompressor(LocalStepsCompressor[DiLoCo]):
    Config = DiLoCo
    title = "DiLoCo"


class LocalSGDCompressor(LocalStepsCompressor[LocalSGD]):
    Config = LocalSGD
    title = "local SGD"
