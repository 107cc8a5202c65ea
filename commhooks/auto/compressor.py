"""The hook auto delegates buckets to the current candidate, and decides which one that is.

`StepWatch` times the steps. At the end of a phase the ranks exchange their measurements, and every
rank decides from the same numbers (`trials.py`). The decision is saved; see `Decision`.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from commhooks.auto import trials
from commhooks.auto.options import QUALITIES, Auto, Candidate
from commhooks.auto.trials import Decision, Watch
from commhooks.auto.watch import ObservedPass, Ranks, StepWatch
from commhooks.compressors.base import (
    RESIDUAL,
    Compressor,
    Exchange,
    State,
    StateField,
    StepInfo,
    average,
)
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.errors import HookConfigError, shown
from commhooks.options import LARGEST_STEP
from commhooks.registry import compressor_named


def new(candidate: Candidate) -> Compressor[Any]:
    """Make the compressor of a candidate. Raises HookConfigError if the candidate, which may come
    from a checkpoint, is none of the hooks that auto chooses from, or has wrong options.
    """
    allowed = dict.fromkeys(choice.hook for choices in QUALITIES.values() for choice in choices)
    made = compressor_named(candidate.hook) if candidate.hook in allowed else None
    if made is None:
        raise HookConfigError(
            f"{shown(candidate.hook)} is none of the hooks that 'auto' chooses from:"
            f" {list(allowed)}"
        )
    try:
        return made(made.Config(**candidate.options_at_once(made.Config)))
    except TypeError as error:
        raise HookConfigError(f"hook {candidate.hook!r}: {error}") from error


def counted_bytes(compressor: Compressor[Any], seen: ObservedPass) -> float:
    wire = compressor.wire_dtype
    return sum(
        plan.sent_bytes(wire) + (plan.flags * plan.wire_itemsize(wire) if plan.compressed else 0)
        for layout, plans in zip(seen.layouts, seen.plans(compressor), strict=True)
        if not layout.sparse
        for plan in plans
    )


def _of_inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name))


class AutoCompressor(Compressor[Auto]):
    """Delegates to the compressor of the current candidate.

    Args:
        decision: None for a new run.
    """

    Config = Auto
    title = "auto"
    wrappers = False
    uses_machines = True
    effect = "the fastest hook here"
    enough_passes = 3
    """Number of valid measurements needed for a decision."""

    def __init__(
        self, config: Auto, *, decision: Decision | None = None, ranks_per_node: int = 1
    ) -> None:
        self.ranks_per_node = ranks_per_node
        self.decision = decision or trials.begin(config, 0, ranks_per_node)
        self._inner = new(self.decision.candidate)
        super().__init__(config, self._inner.wire_dtype)
        self._steps_s: list[float] = []
        self._latest: ObservedPass | None = None

    # ---- delegation
    # ----------------------------------------------------------------------------------------------

    @property
    def inner(self) -> Compressor[Any]:
        self._inner.native = self.native
        return self._inner

    @property
    def _candidates(self) -> list[Compressor[Any]]:
        return [new(candidate) for candidate in self.config.candidates]

    workspace = _of_inner("workspace")
    allocate = _of_inner("allocate")
    plan_one = _of_inner("plan_one")
    initial_value = _of_inner("initial_value")
    memory_plan = _of_inner("memory_plan")
    stats_every = _of_inner("stats_every")
    needs_exact_step = _of_inner("needs_exact_step")

    @property
    def state_fields(self) -> Sequence[StateField]:  # type: ignore[override]
        fields = [field for field in self._inner.state_fields if field.key != RESIDUAL.key]
        return (*fields, RESIDUAL)

    @property
    def elementwise(self) -> bool:
        return self._inner.elementwise

    @property
    def selective(self) -> bool:  # type: ignore[override]
        return self.decision.since is not None and self._inner.selective

    @property
    def computes_from_received(self) -> bool:  # type: ignore[override]
        return any(compressor.computes_from_received for compressor in self._candidates)

    @property
    def start_step(self) -> int:
        return LARGEST_STEP if self.decision.since is None else self.decision.since

    @property
    def begins(self) -> int:
        watch = self.decision.watch
        return watch.end if self.decision.since is None and watch is not None else self.start_step

    @property
    def how_to_begin_earlier(self) -> str:
        return "Set measure_steps to a smaller number, or name the hook"

    @property
    def summary(self) -> str:
        return "; ".join(filter(None, (f'quality="{self.config.quality}"', self.decision.summary)))

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        # Between nodes the engine calls this even if the candidate has no learned state.
        if not self.inner.transactional:
            return self.average(flat, step.world_size)
        return self.inner.exchange(flat, work, state, step)

    @property
    def checks_finite(self) -> bool:
        return self._inner.transactional

    def average(self, flat: torch.Tensor, world_size: int) -> Exchange:
        """Average without the check for finite numbers, unless the candidate needs it.

        The check reads all gradients once more.
        """
        return average(
            flat,
            self.wire_dtype_for(flat.dtype),
            world_size,
            check_finite=self._inner.transactional,
        )

    def may_compress(self, infos: Sequence[ParameterInfo]) -> list[bool]:
        learning = [compressor for compressor in self._candidates if compressor.state_fields]
        plans = [compressor.plan(infos) for compressor in (self._inner, *learning)]
        rows = zip(*plans, strict=True)  # one per parameter
        return [any(plan.compressed for plan in row) for row in rows]

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        builds = [
            compressor.native_build(device, dtype)
            for compressor in self._candidates
            if compressor.transactional
        ]
        # on CUDA PowerSGD has no native kernel
        return " ".join(filter(None, dict.fromkeys(builds)))

    # ---- the decision
    # ----------------------------------------------------------------------------------------------

    def listener(self, session: Any) -> StepWatch:
        return StepWatch(session)

    @property
    def watch(self) -> Watch | None:
        """The steps to measure; None if no further decision follows."""
        return self.decision.watch

    @property
    def between_nodes(self) -> bool:
        return self.decision.candidate.between_nodes

    def with_nodes(self, ranks_per_node: int) -> "AutoCompressor":
        return type(self)(self.config, ranks_per_node=ranks_per_node)

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.decision.candidate.label

    @property
    def further_stats(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            "chosen": self.label,
            "chosen_at": None if self.decision.phase == "trying" else self.decision.since,
        }

    @property
    def notes(self) -> dict[str, Any]:
        return self.decision.to_plain()

    def with_notes(self, notes: Any, step: int, *, same_ranks: bool) -> "AutoCompressor":
        if notes is None:
            return self._with(trials.begin(self.config, step, self.ranks_per_node))
        saved = Decision.from_plain(notes)
        for candidate in saved.candidates.values():
            new(candidate)  # raises if the hook or its options are not allowed
        ranks_per_node = self.ranks_per_node
        return self._with(
            trials.resumed(
                saved, self.config, step, same_ranks=same_ranks, ranks_per_node=ranks_per_node
            )
        )

    def with_start(self, start: int) -> "AutoCompressor":
        return self._with(None)

    def _with(self, decision: Decision | None) -> "AutoCompressor":
        return type(self)(self.config, decision=decision, ranks_per_node=self.ranks_per_node)

    # ---- measuring
    # ----------------------------------------------------------------------------------------------

    def observe(self, seen: ObservedPass) -> None:
        """Record one step of `watch` on this rank. Called after the commit."""
        self._steps_s.append(seen.step_s)
        self._latest = seen

    def reconsidered(self, ranks: Ranks, step: int) -> tuple["AutoCompressor", str]:
        """Return the compressor to continue with, and a message for rank 0 to log, or "".

        Called on all ranks at the end of `watch`, at the same committed step, between two passes.
        All ranks return equal results.
        """
        before = self.decision
        after = self._decided(ranks, step)
        message = after.message if after.why != before.why else ""
        if after.candidate != before.candidate or after.since != before.since:
            made = self._with(after)
            made.native = self.native
            return made, message
        self.decision = after
        if after.watch is None or before.watch is None or after.watch.begin != before.watch.begin:
            self._steps_s.clear()  # otherwise the phase continues with its measurements
            self._latest = None
        return self, message

    def _decided(self, ranks: Ranks, step: int) -> Decision:
        now = self.decision
        buckets, passes, times = zip(*ranks.table(self._numbers()), strict=True)
        step_s = max(times) if all(map(math.isfinite, times)) else math.nan
        # A rank may have missed passes, or may have other buckets.
        if len(set(buckets)) > 1 or min(passes) < self.enough_passes or not math.isfinite(step_s):
            return trials.extended(now, step)
        missing_s = trials.TRIAL_S - min(passes) * step_s
        if missing_s > 0:
            return trials.longer(now, step, math.ceil(missing_s / step_s))
        if now.phase == "trying":
            return trials.after_trial(now, step, step_s)
        offered = self._offered(ranks)
        # Shards of a model send different numbers of bytes.
        rows = ranks.table([counted_bytes(new(candidate), self._seen) for candidate in offered])
        columns = zip(*rows, strict=True)  # one per candidate
        sent = {
            candidate.label: max(column) for candidate, column in zip(offered, columns, strict=True)
        }
        return trials.after_measuring(now, step, step_s, offered, sent)

    def _offered(self, ranks: Ranks) -> list[Candidate]:
        now = self.decision.candidate
        # A single rank has nothing to gain.
        offered = self.config.candidates_with(self.ranks_per_node) if ranks.size > 1 else []
        others = [candidate for candidate in offered if candidate.label != now.label]
        # Running out of memory in a trial would end the run.
        rows = ranks.table([float(self._has_memory_for(candidate)) for candidate in others])
        fitting = [candidate for candidate, *fits in zip(others, *rows, strict=True) if all(fits)]
        return [now, *fitting]

    def _has_memory_for(self, candidate: Candidate) -> bool:
        decision = Decision(candidate, None, since=0, phase="decided")
        needed = self._seen.memory(self._with(decision)).total
        try:
            torch.empty(needed, dtype=torch.uint8, device=self._seen.layouts[0].device)
        except (RuntimeError, MemoryError):  # torch's OutOfMemoryError is a RuntimeError
            return False
        return True

    def _numbers(self) -> list[float]:
        valid = [seconds for seconds in self._steps_s if math.isfinite(seconds) and seconds > 0]
        buckets = 0 if self._latest is None else len(self._latest.layouts)
        return [buckets, len(valid), statistics.median(valid) if valid else math.nan]

    @property
    def _seen(self) -> ObservedPass:
        assert self._latest is not None  # enough passes were measured
        return self._latest
