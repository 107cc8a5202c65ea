"""Time the backward passes that an adaptive compressor watches, and pass the measurements to it."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.counters import Mark, has_passed, mark, seconds_between
from commhooks.compressors.adaptive import AdaptiveCompressor, ObservedPass
from commhooks.compressors.base import Compressor
from commhooks.compressors.unit_plan import MemoryPlan, UnitPlan
from commhooks.engine.consensus import Consensus
from commhooks.engine.state import HeldState
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout


@dataclass(frozen=True)
class WatchedPass:
    """Records a backward pass that an adaptive compressor watches, from the end of the previous pass (`began`) to its
    own (`ended`). `outcome` (see `HeldState.outcome`) is valid after `ended`."""

    began: Mark
    ended: Mark
    outcome: torch.Tensor
    layouts: Sequence[BucketLayout]


class WatchedPasses:
    def __init__(self, consensus: Consensus, held: HeldState) -> None:
        self._consensus, self._held = consensus, held
        self._step_began: tuple[Mark] | None = None  # the end of the previous pass
        self._watched: collections.deque[WatchedPass] = collections.deque()  # the compressor has not observed them yet

    def before_pass(self, compressor: AdaptiveCompressor[Any]) -> None:
        """Call this before `Consensus.reach`, in which the compressor may decide."""
        if not self._consensus.compared:  # a state was loaded since the last pass
            self._watched.clear()
            self._step_began = None
        elif self._consensus.decision_is_due(compressor):
            self._show(compressor, wait=True)

    def after_pass(self, compressor: AdaptiveCompressor[Any], step_at_most: int, good: torch.Tensor) -> None:
        """Time the pass that ends now, if the compressor watches this step. Also time the pass before a watch, because
        the first watched step begins at its end."""
        began, self._step_began = self._step_began, None
        if compressor.watch is None or step_at_most + 1 < compressor.watch.begin:
            return
        outcome = self._held.outcome(good)  # queued before the mark, so that it is valid once the mark has passed
        self._step_began = ended = (mark(good.device),)
        if began is not None:
            layouts = [known.layout for known in self._consensus.buckets if known.used]
            self._watched.append(WatchedPass(*began, *ended, outcome, layouts))
            self._show(compressor, wait=False)
            if precision.is_host_readable(good.device):
                self._step_began = (mark(good.device),)  # exclude the time of `_show` from the next step

    def _show(self, compressor: AdaptiveCompressor[Any], *, wait: bool) -> None:
        """Pass the watched passes to `observe`. On an accelerator, do so once the device has finished a pass, usually
        in the next pass. With `wait` the host waits for all of them."""
        watch, names = compressor.watch, self._consensus.binding.names
        while self._watched and (wait or has_passed(self._watched[0].ended)):
            seen = self._watched.popleft()
            seconds = seconds_between(seen.began, seen.ended)
            committed, good = seen.outcome.tolist()
            if good and watch is not None and committed > watch.begin:
                compressor.observe(ObservedPass(seconds, seen.layouts, names, self._memory_plan))

    def _memory_plan(self, compressor: Compressor[Any], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        plans = [plan for bucket in buckets for plan in bucket]
        return self._consensus.reduction_of(compressor).memory_plan(compressor, plans, buckets)
