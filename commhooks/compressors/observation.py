"""What a compressor can learn about the passes that it runs in, and about its ranks.

A compressor that chooses how to compress sets `Compressor.watch`. The engine then measures the passes from `begin` on
and gives each of them to `Compressor.observe`. Before pass `end` it calls `Compressor.reconsidered`, on all ranks at
the same step, which may exchange what was measured and return another compressor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from commhooks.comm.cost import Backend
from commhooks.comm.link import Link
from commhooks.compressors.plan import UnitPlan
from commhooks.gradients.layout import BucketLayout

if TYPE_CHECKING:
    from commhooks.compressors.base import Compressor, State

Look = Callable[[BucketLayout, torch.Tensor, "State"], None]
"""Called with a bucket, its averaged gradient (1-D) and what the rehearsed compressor has learned from it."""


@dataclass(frozen=True)
class Watch:
    """Committed steps that are measured: `begin` to `end - 1`. At `end` the compressor is reconsidered."""

    begin: int
    end: int


@dataclass(frozen=True)
class Rehearsal:
    """Seconds.

    Attributes:
        fastest_s: of the fastest round over all buckets.
        spent_s: of all that the rehearsal did.
    """

    fastest_s: float
    spent_s: float


class Seen(Protocol):
    """One committed backward pass of this rank, as the engine saw it. Seconds on this rank's clock."""

    @property
    def step_s(self) -> float:
        """From the end of the pass before to the end of this one."""

    @property
    def waiting_s(self) -> float:
        """The part of it spent waiting for collectives."""

    @property
    def computing_s(self) -> tuple[float, ...]:
        """Per bucket: what passed outside of the hook before it was ready. The first includes the optimizer's step, the
        data and the forward pass."""

    @property
    def layouts(self) -> Sequence[BucketLayout]:
        """The buckets."""

    def plans(self, compressor: Compressor[Any]) -> list[list[UnitPlan]]:
        """What `compressor` would do to each bucket. Can be called later, too."""

    def rehearse(self, compressor: Compressor[Any], rounds: int, look: Look | None = None) -> Rehearsal:
        """Let `compressor` reduce copies of the buckets without other ranks, `rounds` times in a row, and throw the
        results away. Call it within `observe` only.

        Args:
            look: called for each bucket after its last round.
        """


class Ranks(Protocol):
    """The ranks that average their gradients. All of them must call each method, in the same order."""

    @property
    def size(self) -> int: ...

    @property
    def backend(self) -> Backend:
        """Like whose collectives theirs are: gloo's or NCCL's."""

    def together(self) -> int:
        """How many of them share the network of one machine; 1 if all are on one machine."""

    def table(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, a row each; equal on all ranks. All must give as many."""

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """The numbers of rank 0. All must give as many."""

    def link(self) -> Link:
        """Measure the network with a few all-reduces. Equal on all ranks."""
