"""The learned state of a compressor, described field by field: the checkpoint, the ranks' agreement, the loss scale and
the memory plan follow from it."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from commhooks.compressors.plan import UnitPlan
from commhooks.gradients.layout import to_logical, to_memory
from commhooks.gradients.precision import compute_dtype


@dataclass(frozen=True)
class StateField:
    """One kind of tensor that a compressor remembers from step to step: one tensor per parameter (or per bucket).

    As it stands it is a tensor like the parameter, kept flat in memory order and saved in the parameter's shape.
    Subclasses override how it is saved, and what becomes of it when the plan has changed.

    Attributes:
        key: its name in the learned state and in the checkpoint.
        per: "bucket": one tensor per compressed unit of a compressor of whole buckets, saved by the unit's name as it
            is.
        replicated: every rank has the same; False: each rank has its own, of which only the mean over ranks matters,
            and `save_residual` decides what is saved (mean / per_rank / drop).
        scales_with_loss: proportional to the loss, so that it follows a GradScaler.
    """

    key: str
    per: Literal["parameter", "bucket"] = "parameter"
    replicated: bool = True
    scales_with_loss: bool = False

    def __post_init__(self) -> None:
        if not self.replicated and (self.key, self.per) != ("residual", "parameter"):
            raise ValueError(
                f"StateField({self.key!r}): what each rank has for itself is its residual, one per parameter; a "
                "checkpoint has no place for anything else of the kind. Use RESIDUAL"
            )

    def shape(self, plan: UnitPlan) -> tuple[int, ...]:
        """Of the tensor that is kept for a compressed unit."""
        return (plan.numel,)

    def size_bytes(self, plan: UnitPlan) -> int:
        """Of the tensor that is kept for a compressed unit."""
        return math.prod(self.shape(plan)) * self.dtype(plan).itemsize

    def to_saved(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU that does not depend on the memory format. `value` as it is in the learned state."""
        # To the CPU first: a clone on an accelerator would take memory that the model was given.
        return to_logical(value.detach().to("cpu", copy=True), parameter).contiguous()

    def from_saved(self, saved: torch.Tensor, parameter: torch.Tensor, row_dim: int) -> torch.Tensor | None:
        """The inverse of `to_saved`; None where it cannot be used. `row_dim`: the slowest dimension at the save."""
        return to_memory(saved.detach(), parameter)

    def refit(self, value: torch.Tensor, plan: UnitPlan, fresh: torch.Tensor | None) -> torch.Tensor | None:
        """`value` for the plan of now, where options have changed since it was made; None: begin anew.

        Args:
            fresh: what the compressor would begin with (see `Compressor.fresh`), if it has such a thing.
        """
        return value

    def problem(self, value: torch.Tensor, plan: UnitPlan) -> str | None:
        """Why `value` cannot belong to this unit, for an error; None if it can."""
        if value.numel() != plan.numel:
            shape = tuple(plan.shape)
            return f"a {self.key} of {value.numel()} numbers for parameter {plan.name}, which has shape {shape}"
        return None

    def dtype(self, plan: UnitPlan) -> torch.dtype:
        """In which it is kept."""
        return compute_dtype(plan.dtype)


RESIDUAL = StateField("residual", replicated=False, scales_with_loss=True)
"""Error feedback: what compression has not sent yet, per parameter. It is added to the next gradient."""
