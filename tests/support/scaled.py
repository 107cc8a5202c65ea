"""A compressor with every kind of collective and a further learned field, as no built-in has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import commhooks
from commhooks import (
    RESIDUAL,
    HookConfig,
    ParameterInfo,
    Send,
    State,
    StateField,
    StepInfo,
    UnitPlan,
    Verdict,
)


@dataclass(frozen=True, kw_only=True)
class Scaled(HookConfig):
    """Gradients as small whole numbers times a scale.

    Args:
        levels: the largest of these numbers.
        remembered: how many of the largest elements of each gradient are remembered, to clip the
            next one.
    """

    hook_name: ClassVar[str] = "scaled"

    levels: int = 7
    remembered: int = 3


@dataclass(frozen=True)
class ScaledPlan(UnitPlan):
    remembered: int = 0


class Largest(StateField):
    """The largest elements of the latest gradient, in falling order."""

    def shape(self, plan: UnitPlan) -> tuple[int, ...]:
        assert isinstance(plan, ScaledPlan)
        return (plan.remembered,)

    def to_saved(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return value.detach().to("cpu", copy=True)

    def from_saved(
        self, saved: torch.Tensor, parameter: torch.Tensor, row_dim: int
    ) -> torch.Tensor | None:
        return saved.detach()

    def refit(
        self, value: torch.Tensor, plan: UnitPlan, initial: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Fill missing elements with the smallest one."""
        (wanted,) = self.shape(plan)
        return torch.cat([value, value[-1:].expand(max(0, wanted - len(value)))])[:wanted].clone()

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        return (
            None
            if value.dim() == 1 and len(value)
            else f"a {self.key} of shape {tuple(value.shape)}"
        )


class ScaledCompressor(commhooks.Compressor[Scaled]):
    Config = Scaled
    title = "scaling"
    state_fields = (Largest("largest"), RESIDUAL)

    def plan_parameter(self, info: ParameterInfo) -> UnitPlan:
        alone = ScaledPlan.uncompressed(info, "")
        assert isinstance(alone, ScaledPlan)
        return replace(
            alone,
            compressed=True,
            numel_compressed=info.numel,
            flags=2,
            remembered=self.config.remembered,
        )

    def exchange(
        self, flat: torch.Tensor, work: Any, state: State, step: StepInfo
    ) -> commhooks.Exchange:
        layout, plans = work
        deltas = [commhooks.with_residual(slot, flat, state, step) for slot in layout.slots]
        # Those that are known clip: what a resume forgets shows in the gradients.
        for slot, delta in zip(layout.slots, deltas, strict=True):
            largest = state["largest"].get(slot.name)
            if largest is not None:
                delta.clamp_(-2 * largest[0], 2 * largest[0])
        units = yield Send(
            torch.stack([delta.abs().amax() for delta in deltas]), what="scale", op="max"
        )
        units = units / self.config.levels + 1e-30
        counts = yield Send(
            torch.stack([delta.abs().mean() for delta in deltas]), what="means", op="gather"
        )
        assert counts.shape == (step.world_size, len(deltas))
        # Ranks with large gradients count for more.
        shares = [counts[:, i] / counts[:, i].sum() for i in range(len(deltas))]
        # Plus 0: a sum over ranks keeps no minus before a zero.
        sent = [torch.round(delta / unit) + 0.0 for delta, unit in zip(deltas, units, strict=True)]
        buffer = torch.cat([codes / step.world_size for codes in sent])
        mean = yield Send(buffer, what="numbers", last=True)
        good = yield Verdict(mean.isfinite().all())
        arrived: Sequence[torch.Tensor] = mean.split([len(codes) for codes in sent])
        for i, (slot, plan) in enumerate(zip(layout.slots, plans, strict=True)):
            gradient = arrived[i] * units[i] * (1 + shares[i].amax())
            slot.of(flat).copy_(gradient)
            commhooks.keep_residual(slot, deltas[i] - sent[i] * units[i], good, state)
            if bool(good):
                state["largest"][slot.name] = gradient.abs().topk(plan.remembered).values
