"""Reduce a bucket over the ranks. `node_reduction.py` does so for nodes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import gather_rows
from commhooks.comm.nodes import Nodes
from commhooks.compressors.base import Compressor, Exchange, StepInfo
from commhooks.compressors.unit_plan import MemoryPlan, UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype


class FlatReduction:
    """Every rank compresses every bucket, and exchanges it with all other ranks.

    `description`: the nodes, for the summary. `ranks_per_residual`: number of ranks whose summed
    gradient a residual corrects.
    """

    nodes: Nodes | None = None
    description: str = ""
    ranks_per_residual: int = 1

    def keeps(self, name: str) -> bool:
        """Return whether this rank keeps the local tensors (residuals) of the parameter `name`."""
        return True

    def plans(self, compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        """Mark the parameters of a bucket that `exchange` handles as compressed."""
        return list(plans)

    def workspace(
        self,
        compressor: Compressor[Any],
        layout: BucketLayout,
        plans: Sequence[UnitPlan],
        step: StepInfo,
    ) -> Any:
        """Allocate the workspace of `exchange` for a layout in which something is compressed."""
        work = compressor.workspace(layout, plans)
        compressor.allocate(work, step)
        return work

    def memory_plan(
        self,
        compressor: Compressor[Any],
        plans: Sequence[UnitPlan],
        buckets: Sequence[Sequence[UnitPlan]],
    ) -> MemoryPlan:
        return compressor.memory_plan(plans, buckets)

    def exchange(
        self, compressor: Compressor[Any]
    ) -> Callable[[torch.Tensor, Any, LearnedState, StepInfo], Exchange]:
        return compressor.exchange

    def redistribute_residuals(
        self, state: LearnedState, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        """Move loaded local tensors (residuals) to the ranks that use them, keeping their mean.

        If the ranks' local tensors may differ, all ranks of `group` call this after comparing their
        states. `parameters` has all parameters of the model.
        """
        # After a save with nodes each rank has only the residuals of its share. Add zeros for the
        # rest, so that all ranks save the same names.
        for key in sorted(state.local) if parameters else ():
            held = gather_held(state[key], parameters, group)
            for place, name in enumerate(parameters):
                if any(row[place] for row in held):
                    state[key].setdefault(name, zeros_for(parameters[name]))

    def rebase(self, tensors: dict[str, torch.Tensor], name: str, mean: torch.Tensor) -> None:
        """Set `tensors[name]`, a field of one parameter, as if all ranks had loaded `mean`."""
        tensors[name] = mean


FLAT = FlatReduction()


def gather_held(
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
) -> list[list[bool]]:
    """Return, for each rank of `group` and each parameter, whether `tensors` has an entry there.

    All ranks must call this.
    """
    device = next(iter(parameters.values())).device
    here = torch.tensor([name in tensors for name in parameters], dtype=torch.uint8, device=device)
    rows = gather_rows(here, group, None, "which residuals each rank has")
    held: list[list[bool]] = rows.bool().tolist()
    return held


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros(
        parameter.numel(), dtype=compute_dtype(parameter.dtype), device=parameter.device
    )
