"""Describe a compressor's learned state, and count its bytes.

Checkpoints, the consensus, loss scaling and the memory plan use these descriptions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from commhooks.compressors.unit_plan import MemoryPlan, UnitPlan, real_itemsize
from commhooks.gradients.layout import to_logical, to_memory
from commhooks.gradients.precision import compute_dtype


@dataclass(frozen=True)
class StateField:
    """Describes tensors that a compressor keeps from step to step, one per parameter or bucket.

    By default a tensor has as many elements as the parameter, is kept flat in memory order, and is
    saved in the parameter's shape. Subclasses override the shape, the saved form, and the
    conversion after the plan has changed.

    Attributes:
        key: its name in the learned state and in the checkpoint.
        per: "parameter" or "bucket": one tensor per compressed unit of a compressor of whole
            buckets, saved under the unit's name without conversion.
        replicated: True: equal on every rank. False: different on every rank, and only the mean
            over the ranks matters; the option `save_residual` (mean, per_rank or drop) selects what
            is saved.
        scales_with_loss: whether it is proportional to the loss, and rescaled when the scale of a
            GradScaler changes.
    """

    key: str
    per: Literal["parameter", "bucket"] = "parameter"
    replicated: bool = True
    scales_with_loss: bool = False

    def __post_init__(self) -> None:
        # Version 1 of the checkpoint format defines these keys.
        if self.key in ("shape", "row_dim") or (self.key == "q" and type(self) is StateField):
            raise ValueError(
                f"StateField({self.key!r}): the checkpoint keeps something else under this key"
            )
        if self.replicated and self.key == "residual":
            raise ValueError(
                "StateField('residual') differs between ranks: use RESIDUAL, or replicated=False"
            )
        if not self.replicated and (self.key, self.per) != ("residual", "parameter"):
            raise ValueError(
                f"StateField({self.key!r}): the only field that may differ between ranks is the"
                " residual, one per parameter; use RESIDUAL"
            )

    def shape(self, plan: UnitPlan) -> tuple[int, ...]:
        return (plan.numel,)

    def size_bytes(self, plan: UnitPlan) -> int:
        return math.prod(self.shape(plan)) * self.dtype(plan).itemsize

    def to_saved(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of `value` on the CPU, independent of the parameter's memory format."""
        # Copy to the CPU first: a clone on the accelerator would need additional device memory.
        return to_logical(value.detach().to("cpu", copy=True), parameter).contiguous()

    def from_saved(
        self, saved: torch.Tensor, parameter: torch.Tensor, row_dim: int
    ) -> torch.Tensor | None:
        """Invert `to_saved`; return None if `saved` cannot be used.

        `row_dim` was the slowest dimension at the save.
        """
        return to_memory(saved.detach(), parameter)

    def refit(
        self, value: torch.Tensor, plan: UnitPlan, initial: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Convert `value` after the plan has changed; return None to discard it.

        `initial`: see `Compressor.initial_value`.
        """
        return value if tuple(value.shape) == self.shape(plan) else None

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        """Return an error message if `value` cannot belong to this unit, else None."""
        # Any other shape may depend on options: then the field is refitted or starts afresh.
        if self.shape(plan) == (plan.numel,) and value.numel() != plan.numel:
            shape = tuple(plan.shape)
            return (
                f"a {self.key} of {value.numel()} numbers for parameter {plan.name}, which has"
                f" shape {shape}"
            )
        return None

    def dtype(self, plan: UnitPlan) -> torch.dtype:
        return compute_dtype(plan.dtype)


RESIDUAL = StateField("residual", replicated=False, scales_with_loss=True)
"""Error feedback: the part of a parameter's gradient that was not sent, added to the next one."""


def memory_of(
    plans: Sequence[UnitPlan], fields: Sequence[StateField], wire_dtype: torch.dtype | None
) -> MemoryPlan:
    """Count the bytes of `fields`, and of a message and a copy of every compressed gradient."""
    residual = factors = packed = copies = 0
    for plan in plans:
        if not plan.compressed:
            continue
        for field in fields:
            if field.replicated:
                factors += field.size_bytes(plan)
            else:
                residual += field.size_bytes(plan)
        packed += plan.numel_sent * plan.wire_itemsize(wire_dtype)
        copies += plan.numel * max(4, real_itemsize(plan.dtype))
    return MemoryPlan(residual, factors, packed, copies=copies)
