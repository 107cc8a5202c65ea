"""How the ranks share the work on a bucket. Here: all alike. In `hierarchy.py` each has a share of it."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import Reach, gather_rows
from commhooks.comm.nodes import Nodes
from commhooks.compressors.base import Compressor, Exchange, StepInfo
from commhooks.compressors.unit_plan import MemoryPlan, UnitPlan
from commhooks.engine.state import LearnedState
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype


class Flat:
    """Every rank compresses every bucket, and sends to all others.

    Attributes:
        words: how the ranks are arranged, for the log; "" if they are not.
        complete: every rank has the local tensors (residuals) of all parameters.
        ranks_per_residual: a residual is that of the sum of so many ranks' gradients.
        groups: return the ranks that a collective is for, where these are not all of the session: by their `Reach`.
            Those of a "node" receive different things: what one of them finds not finite counts for all.
    """

    words: str = ""
    complete: bool = True
    ranks_per_residual: int = 1
    groups: Mapping[Reach, Callable[[], dist.ProcessGroup]] = MappingProxyType({})

    def keeps(self, name: str) -> bool:
        """Whether this rank keeps the local tensors (residuals) of the parameter `name`."""
        return True

    def plans(self, compressor: Compressor[Any], plans: Sequence[UnitPlan]) -> list[UnitPlan]:
        """The plans of the parameters of a bucket, in which those that `exchange` has to do with are compressed."""
        return list(plans)

    def workspace(self, compressor: Compressor[Any], layout: BucketLayout, plans: Sequence[UnitPlan]) -> Any:
        """What `exchange` needs for buckets of this layout, at least one unit of which is compressed."""
        return compressor.workspace(layout, plans)

    def memory_plan(
        self, compressor: Compressor[Any], plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        """Bytes needed on this rank; see `Compressor.memory_plan`."""
        return compressor.memory_plan(plans, buckets)

    def exchange(self, compressor: Compressor[Any]) -> Callable[[torch.Tensor, Any, LearnedState, StepInfo], Exchange]:
        """What averages a bucket: flat, workspace, state, step; see `Compressor.exchange`."""
        return compressor.exchange

    def redistribute_residuals(
        self, state: LearnedState, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        """Move loaded local tensors (residuals) to the ranks that use them, without changing their mean over all ranks.
        All ranks of `group` call this when they have agreed on the state, if they may have different ones.
        `parameters`: name -> parameter of the whole model."""
        # Saved between nodes, each rank has those of its share: zeros for the rest, so that all ranks save the same.
        for key in sorted(state.local) if parameters else ():
            held = gather_held(state[key], parameters, group)
            for place, name in enumerate(parameters):
                if any(row[place] for row in held):
                    state[key].setdefault(name, zeros_for(parameters[name]))

    def rebase(self, tensors: dict[str, torch.Tensor], name: str, mean: torch.Tensor) -> None:
        """Let `tensors`, of one field by parameter name, be as if `mean` had just been loaded for `name` on all
        ranks."""
        tensors[name] = mean


class EqualInNodes(Flat):
    """The ranks of a node bring the same, and each averages it with one rank of every other node."""

    def __init__(self, nodes: Nodes) -> None:
        self.words = nodes.words
        self.groups = {"all": lambda: nodes.across, "nodes": lambda: nodes.across, "node": lambda: nodes.node}


def gather_held(
    tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup
) -> list[list[bool]]:
    """For each rank of `group`, for each of `parameters`, whether `tensors` has something for it there. All of these
    ranks must call this."""
    device = next(iter(parameters.values())).device
    own = torch.tensor([name in tensors for name in parameters], dtype=torch.uint8, device=device)
    held: list[list[bool]] = gather_rows(own, group, None, "which residuals each rank has").bool().tolist()
    return held


def zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    """A residual of zeros."""
    return torch.zeros(parameter.numel(), dtype=compute_dtype(parameter.dtype), device=parameter.device)


FLAT = Flat()
