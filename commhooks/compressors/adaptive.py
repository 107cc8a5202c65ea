"""Define the base of compressors that measure training and decide what to do, such as `auto`.

The engine times the steps in `AdaptiveCompressor.watch` and passes each measurement to `observe`. Before the step at
the end of the watch it calls `reconsidered` on all ranks, and continues with the result.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import gather_rows
from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.names import ParameterNames
from commhooks.options import ConfigT


@dataclass(frozen=True)
class Watch:
    begin: int
    end: int


@dataclass
class ObservedPass:
    """Holds one committed backward pass of this rank. `step_s`: seconds from the end of the previous pass to the end of
    this one; NaN on a device without a clock. `memory_plan`: returns the bytes that a compressor needs, given its plans
    by bucket."""

    step_s: float
    layouts: Sequence[BucketLayout]
    names: ParameterNames
    memory_plan: Callable[[Compressor[Any], Sequence[Sequence[UnitPlan]]], MemoryPlan]

    def memory(self, compressor: Compressor[Any]) -> MemoryPlan:
        return self.memory_plan(compressor, self.plans(compressor))

    def plans(self, compressor: Compressor[Any]) -> list[list[UnitPlan]]:
        config = compressor.config
        return [
            compressor.plan(
                [ParameterInfo.of(s.name, s.parameter, self.names, config, layout.sparse) for s in layout.slots]
            )
            for layout in self.layouts
        ]


class Ranks:
    """Exchanges numbers, in tensors on `device`, between the ranks that average their gradients (`group`) and, if a
    replica is sharded, between its shards (`shards`)."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        counters: Counters,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self.size = group.size()
        self._group, self._shards = group, shards
        self._device = device
        self._counters = counters

    def table(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, one row per rank. All ranks must call this with equally many numbers."""
        what = "what each rank has measured (let every rank take part in each pass)"
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        rows = gather_rows(own, self._group, self._counters, what)
        if self._shards is not None:
            rows = gather_rows(rows.flatten(), self._shards, self._counters, what).view(-1, len(numbers))
        found: list[list[float]] = rows.tolist()
        return found


class AdaptiveCompressor(Compressor[ConfigT]):
    ranks_per_node: int = 1
    """1 without nodes."""

    @property
    def between_nodes(self) -> bool:
        """Whether the current choice works between nodes, on gradients averaged inside them."""
        return False

    def with_nodes(self, ranks_per_node: int) -> "AdaptiveCompressor[ConfigT]":
        """Return a copy that has decided nothing yet, for ranks that form nodes. Without it nodes are not supported."""
        raise NotImplementedError

    @property
    @abstractmethod
    def watch(self) -> Watch | None:
        """The steps to measure, or None if no further decision follows."""

    @property
    @abstractmethod
    def notes(self) -> dict[str, Any]:
        """The decision for checkpoints, in plain types. Equal on all ranks."""

    @property
    @abstractmethod
    def chosen(self) -> str:
        """The name of the current choice in plans and statistics."""

    @property
    @abstractmethod
    def chosen_at(self) -> int | None:
        """The first step of the current choice; None before the first decision."""

    @property
    @abstractmethod
    def begins(self) -> int:
        """The earliest step at which compression can begin."""

    @property
    @abstractmethod
    def how_to_begin_earlier(self) -> str:
        """Advice for the message about a training that ends before `begins`."""

    @abstractmethod
    def with_notes(self, notes: Any, step: int, *, same_ranks: bool) -> "AdaptiveCompressor[ConfigT]":
        """Return a copy that continues with saved `notes`, which may be damaged (None: nothing was saved). `step`:
        number of committed steps at the save. Raises HookConfigError if the notes cannot be used."""

    @abstractmethod
    def observe(self, seen: ObservedPass) -> None:
        """Record one step of `watch` on this rank. Called after the commit."""

    @abstractmethod
    def reconsidered(self, ranks: Ranks, step: int) -> tuple["AdaptiveCompressor[ConfigT]", str]:
        """Return the compressor to continue with, and a message for rank 0 to log, or "". Called on all ranks at the
        end of `watch`, at the same committed step, before the first bucket of a pass. All ranks must return equal
        results."""
