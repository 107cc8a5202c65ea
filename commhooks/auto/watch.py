"""Time the steps that `auto` watches, and let it decide between two backward passes."""

import collections
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import gather_rows
from commhooks.comm.counters import Counters, Mark, has_passed, mark, seconds_between
from commhooks.compressors.base import Compressor
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.engine.session import Session
from commhooks.errors import log_summary
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.names import ParameterNames

if TYPE_CHECKING:
    from commhooks.auto.compressor import AutoCompressor


@dataclass
class ObservedPass:
    """Holds one committed backward pass of this rank.

    Attributes:
        step_s: seconds from the end of the previous pass to the end of this one; NaN on a device
            without a clock.
        memory_plan: returns the bytes that a compressor needs, given its plans by bucket.
    """

    step_s: float
    layouts: Sequence[BucketLayout]
    names: ParameterNames
    memory_plan: Callable[[Compressor[Any], Sequence[Sequence[UnitPlan]]], MemoryPlan]

    def memory(self, compressor: Compressor[Any]) -> MemoryPlan:
        return self.memory_plan(compressor, self.plans(compressor))

    def plans(self, compressor: Compressor[Any]) -> list[list[UnitPlan]]:
        return [compressor.plan(self._infos(layout, compressor)) for layout in self.layouts]

    def _infos(self, layout: BucketLayout, compressor: Compressor[Any]) -> list[ParameterInfo]:
        return [
            ParameterInfo.of(
                slot.name, slot.parameter, self.names, compressor.config, layout.sparse
            )
            for slot in layout.slots
        ]


class Ranks:
    """Exchanges numbers between the ranks that average their gradients.

    Args:
        group: these ranks.
        device: the device of the tensors that are sent.
        shards: the ranks that hold the shards of a replica, which then take part, too.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        counters: Counters,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self.size = group.size()
        self._group = group
        self._shards = shards
        self._device = device
        self._counters = counters

    def table(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, a row per rank. All must call this with as many."""
        what = "what each rank has measured (let every rank take part in each pass)"
        row = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        rows = gather_rows(row, self._group, self._counters, what)
        if self._shards is not None:
            of_shards = gather_rows(rows.flatten(), self._shards, self._counters, what)
            rows = of_shards.view(-1, len(numbers))
        table: list[list[float]] = rows.tolist()
        return table


@dataclass(frozen=True)
class _TimedPass:
    """Records a backward pass, from the end of the previous one (`began`) to its own (`ended`).

    `outcome` (see `HeldState.outcome`) is valid after `ended`.
    """

    began: Mark
    ended: Mark
    outcome: torch.Tensor
    layouts: Sequence[BucketLayout]


class StepWatch:
    """Listens (`engine.session.Listener`) to the passes of a session with an `AutoCompressor`."""

    def __init__(self, session: Session) -> None:
        # Weak references: the session owns this object, and with the learned state no cycle may
        # wait for the garbage collector.
        self._session_ref = weakref.ref(session)
        # The one that was current in the previous pass.
        self._compressor: weakref.ref[AutoCompressor] | None = None
        self._previous_end: tuple[Mark] | None = None
        self._unseen: collections.deque[_TimedPass] = collections.deque()

    def before_pass(self, group: dist.ProcessGroup, device: torch.device) -> None:
        auto = self._current()
        # a state was loaded since the previous pass
        if self._compressor is None or self._compressor() is not auto:
            self._unseen.clear()
            self._previous_end = None
        if self._decides_now(auto):
            self._show(auto, wait=True)
            auto = self._decide(auto, group, device)
        self._compressor = weakref.ref(auto)

    def after_pass(self, step_at_most: int, good: torch.Tensor) -> None:
        """Time the pass that ends now, if the compressor watches this step.

        Also time the pass before a watch, because the first watched step begins at its end.
        """
        auto = self._current()
        began = self._previous_end
        self._previous_end = None
        if auto.watch is None or step_at_most + 1 < auto.watch.begin:
            return
        # Queued before the mark, so that it is valid once the mark has passed.
        outcome = self._session.held.outcome(good)
        self._previous_end = ended = (mark(good.device),)
        if began is not None:
            buckets = self._session.consensus.buckets
            layouts = [bucket.layout for bucket in buckets if bucket.used]
            self._unseen.append(_TimedPass(*began, *ended, outcome, layouts))
            self._show(auto, wait=False)
            if precision.is_host_readable(good.device):
                # the next step does not include the time of `_show`
                self._previous_end = (mark(good.device),)

    @property
    def _session(self) -> Session:
        session = self._session_ref()
        assert session is not None  # it calls this object
        return session

    def _current(self) -> "AutoCompressor":
        return self._session.compressor  # type: ignore[return-value]

    def _decides_now(self, auto: "AutoCompressor") -> bool:
        watch = auto.watch
        if watch is None:
            return False
        return self._session.held.steps(watch.end, exact=False)[0] >= watch.end

    def _decide(
        self, auto: "AutoCompressor", group: dist.ProcessGroup, device: torch.device
    ) -> "AutoCompressor":
        session = self._session
        session.held.settle()  # so that all ranks decide at the same committed step
        # Do not hold the lock here: a save in another thread may hold it while it waits for the
        # other ranks' saves.
        ranks = Ranks(group, device, session.counters, session.consensus.binding.shard_group)
        decided, message = auto.reconsidered(ranks, session.state.step)
        if decided is not auto:
            session.replace_compressor(decided, keep_local=decided.label == auto.label)
        if message and session.consensus.buckets.is_logging_rank:
            log_summary(message)
        return decided

    def _show(self, auto: "AutoCompressor", *, wait: bool) -> None:
        """Pass the timed passes to `observe`.

        On an accelerator, do so once the device has finished a pass, usually in the next pass. With
        `wait` the host waits for all of them.
        """
        watch = auto.watch
        names = self._session.consensus.binding.names
        while self._unseen and (wait or has_passed(self._unseen[0].ended)):
            timed = self._unseen.popleft()
            seconds = seconds_between(timed.began, timed.ended)
            committed, good = timed.outcome.tolist()
            if good and watch is not None and committed > watch.begin:
                auto.observe(ObservedPass(seconds, timed.layouts, names, self._memory_plan))

    def _memory_plan(
        self, compressor: Compressor[Any], buckets: Sequence[Sequence[UnitPlan]]
    ) -> MemoryPlan:
        plans = [plan for bucket in buckets for plan in bucket]
        return self._session.consensus.reduction_of(compressor).memory_plan(
            compressor, plans, buckets
        )
