"""What the engine asks of a compressor that measures the training and decides what it does, such as `auto`.

The engine times the passes of `AdaptiveCompressor.watch` and gives each of them to `observe`. Before the pass at the
end of the watch it calls `reconsidered` on all ranks at the same step. That may exchange what was measured, and returns
the compressor to go on with.
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
    """Committed steps that are measured: `begin` to `end - 1`. At `end` the compressor is reconsidered."""

    begin: int
    end: int


@dataclass
class ObservedPass:
    """One committed backward pass of this rank.

    Attributes:
        step_s: seconds from the end of the pass before to the end of this one; NaN on a device without a clock.
        layouts: its buckets.
        names: of the parameters.
        memory_plan: called with a compressor and its plans of the buckets; returns the bytes needed on this rank.
    """

    step_s: float
    layouts: Sequence[BucketLayout]
    names: ParameterNames
    memory_plan: Callable[[Compressor[Any], Sequence[Sequence[UnitPlan]]], MemoryPlan]

    def memory(self, compressor: Compressor[Any]) -> MemoryPlan:
        """Bytes that this rank needs in total if it uses `compressor` on these buckets."""
        return self.memory_plan(compressor, self.plans(compressor))

    def plans(self, compressor: Compressor[Any]) -> list[list[UnitPlan]]:
        """What `compressor` would do to each bucket."""
        config = compressor.config
        return [
            compressor.plan(
                [ParameterInfo.of(s.name, s.parameter, self.names, config, layout.sparse) for s in layout.slots]
            )
            for layout in self.layouts
        ]


class Ranks:
    """The ranks of the model. All of them must call `table`, in the same order.

    Args:
        group: the ranks that average their gradients.
        device: where collectives of `group` need their tensors.
        shards: the ranks that hold the other shards of a replica; None without shards.

    Attributes:
        size: how many ranks average their gradients.
    """

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
        """The numbers of every rank, a row each; equal on all ranks. All must give as many."""
        what = "what each rank has measured (let every rank take part in each pass)"
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        rows = gather_rows(own, self._group, self._counters, what)
        if self._shards is not None:
            rows = gather_rows(rows.flatten(), self._shards, self._counters, what).view(-1, len(numbers))
        found: list[list[float]] = rows.tolist()
        return found


class AdaptiveCompressor(Compressor[ConfigT]):
    """A compressor that decides from measurements what it does.

    Attributes:
        ranks_per_node: 1 if there are no nodes.
    """

    ranks_per_node: int = 1

    @property
    @abstractmethod
    def between_nodes(self) -> bool:
        """Whether it now works between nodes, on gradients that were averaged inside of the nodes."""

    @abstractmethod
    def with_nodes(self, ranks_per_node: int) -> "AdaptiveCompressor[ConfigT]":
        """A copy that has decided nothing, for ranks that form nodes."""

    @property
    @abstractmethod
    def watch(self) -> Watch | None:
        """The steps that are measured; None: none, and it decides no more."""

    @property
    @abstractmethod
    def notes(self) -> dict[str, Any]:
        """What it has decided, for checkpoints: plain types, equal on all ranks."""

    @property
    @abstractmethod
    def chosen(self) -> str:
        """The name of what it does now, for plans and statistics."""

    @property
    @abstractmethod
    def chosen_at(self) -> int | None:
        """The step from which it does so; None if it has decided nothing yet."""

    @property
    @abstractmethod
    def begins(self) -> int:
        """The step at which compression may begin, as far as it is known."""

    @property
    @abstractmethod
    def how_to_begin_earlier(self) -> str:
        """Advice for a training that ends before `begins`."""

    @abstractmethod
    def with_notes(self, notes: Any, step: int, *, same_ranks: bool) -> "AdaptiveCompressor[ConfigT]":
        """A copy that continues with saved `notes`.

        Args:
            notes: as saved; they may be damaged. None if nothing was.
            step: committed steps at the save.
            same_ranks: as many ranks as at the save.

        Raises:
            HookConfigError: they cannot be used.
        """

    @abstractmethod
    def observe(self, seen: ObservedPass) -> None:
        """Take in a pass of `watch`, on this rank. Called after its commit."""

    @abstractmethod
    def reconsidered(self, ranks: Ranks, step: int) -> tuple["AdaptiveCompressor[ConfigT]", str]:
        """The compressor to go on with, this or another one, and a message for rank 0 to log, or "". Called at the end
        of `watch`, on all ranks at the same committed step, before the first bucket of a pass. All ranks must decide
        alike."""
