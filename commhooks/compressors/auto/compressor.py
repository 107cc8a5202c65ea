"""`hook="auto"` as a compressor: delegates each bucket to the candidate in force, and decides which that is.

    measuring   plain all-reduce; codecs are rehearsed on the real gradients      -> predict, choose
    trying      the new choice is in force and measured                           -> keep it, or choose another
    resting     until the next look: has the time of a step changed by a lot?     -> rest on, or measure again

What a phase has measured is exchanged at its end, before the first bucket of a pass, and every rank decides from the
same table. The decision is saved; see `Decision`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commhooks.compressors.auto import candidates, words
from commhooks.compressors.auto.candidates import Candidate
from commhooks.compressors.auto.choice import LATER_MARGIN, MARGIN, choose, expected_s, has_changed
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.decision import Decision, Figures
from commhooks.compressors.auto.loads import codec_times, load_of
from commhooks.compressors.auto.per_layer import powersgd_candidates
from commhooks.compressors.auto.prediction import predicted_s
from commhooks.compressors.auto.report import Report, slowest
from commhooks.compressors.auto.watcher import Watcher
from commhooks.compressors.base import RESIDUAL, Compressor, Exchange, State, StateField, StepInfo, Trial
from commhooks.compressors.config import LARGEST_STEP, HookConfig
from commhooks.compressors.kernel import TORCH, Kernel, KernelsHere
from commhooks.compressors.native.choice import NAME as NATIVE
from commhooks.compressors.observation import Ranks, Seen, Watch
from commhooks.compressors.plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.gradients.layout import BucketLayout

TRY_STEPS = 8
"""Steps with a new choice that are measured."""
LOOK_STEPS = 8
"""Steps that are measured at the end of a rest."""
MOST_SHARE = 0.01
"""Share of the time that measuring may take after the first decision."""
MOST_EXTENSIONS = 5


class AutoCompressor(Compressor[Auto]):
    """
    Args:
        decision: None: nothing decided yet.
    """

    Config = Auto
    title = "auto"
    wrappers = ()
    flat_only = True
    enough_passes = 3
    """Passes that have to make sense before a decision."""

    def __init__(
        self, config: Auto, wire_dtype: torch.dtype | None = None, *, decision: Decision | None = None
    ) -> None:
        simple = candidates.simple(config)
        self.decision = decision or Decision.begin(simple[0], 0, config.measure_steps)
        self._inner = self.decision.candidate.new()
        super().__init__(config, self._inner.wire_dtype)
        self._watcher = self._new_watcher()

    # ---- delegation --------------------------------------------------------------------------------------------------

    @property
    def inner(self) -> Compressor[Any]:
        """The compressor of the candidate in force."""
        self._inner.kernel = self.kernel
        return self._inner

    @property
    def state_fields(self) -> Sequence[StateField]:  # type: ignore[override]
        """Those in force, and the residual, which outlasts a change of the candidate."""
        others = [each for each in self._inner.state_fields if each.key != RESIDUAL.key]
        return (*others, RESIDUAL)

    @property
    def selective(self) -> bool:  # type: ignore[override]
        return self.decision.since is not None and self._inner.selective

    @property
    def stats_every(self) -> int | None:  # type: ignore[override]
        return self._inner.stats_every

    @property
    def needs_exact_step(self) -> bool:
        return self._inner.needs_exact_step

    @property
    def planning_config(self) -> HookConfig:
        return self._inner.planning_config

    @property
    def start_step(self) -> int:
        return LARGEST_STEP if self.decision.since is None else self.decision.since

    @property
    def words(self) -> str:
        return f'quality="{self.config.quality}"; {words.state(self.decision)}'

    @property
    def chosen(self) -> str:  # type: ignore[override]
        return self.decision.candidate.label

    @property
    def judges_averages(self) -> bool:  # type: ignore[override]
        """While nothing is compressed, reading all gradients once more would be the only cost."""
        return self._inner.transactional

    @property
    def chosen_at(self) -> int | None:  # type: ignore[override]
        return self.decision.since

    def plan_one(self, info: ParameterInfo) -> UnitPlan:
        return self._inner.plan_one(info)

    def workspace(self, layout: BucketLayout, plans: Sequence[UnitPlan]) -> Any:
        return self.inner.workspace(layout, plans)

    def exchange(self, flat: torch.Tensor, work: Any, state: State, step: StepInfo) -> Exchange:
        return self.inner.exchange(flat, work, state, step)

    def fresh(self, field: StateField, plan: UnitPlan, dtype: torch.dtype) -> torch.Tensor | None:
        return self._inner.fresh(field, plan, dtype)

    def computes(self, plan: UnitPlan) -> bool:
        return self._inner.computes(plan)

    def memory_plan(self, plans: Sequence[UnitPlan], buckets: Sequence[Sequence[UnitPlan]]) -> MemoryPlan:
        return self.inner.memory_plan(plans, buckets)

    def may_compress(self, infos: Sequence[ParameterInfo]) -> list[bool]:
        """Whether any candidate compresses the parameter."""
        learning = [each for each in self._probes().values() if each.state_fields]
        plans = [each.plan(infos) for each in (self._inner, *learning)]
        return [any(plan.compressed for plan in each) for each in zip(*plans, strict=True)]

    def kernels_here(self, device: torch.device, dtype: torch.dtype) -> KernelsHere:
        """One name for all candidates: the native kernel if this machine has that of each."""
        found = [each.kernels_here(device, dtype) for each in self._probes().values() if each.transactional]
        natives = [[kernel for kernel in each.kernels if kernel.name == NATIVE] for each in found]
        if all(natives):
            builds = dict.fromkeys(kernels[0].build for kernels in natives)
            return KernelsHere((Kernel(NATIVE, " ".join(builds)), TORCH))
        return KernelsHere(missing=next((each.missing for each in found if each.missing), ""))

    @classmethod
    def trials(cls, ranks: Sequence[int], options: Mapping[str, Any]) -> Sequence[Trial]:
        return ()  # the doctor measures the candidates themselves

    # ---- learned state -----------------------------------------------------------------------------------------------

    @property
    def notes(self) -> dict[str, Any]:  # type: ignore[override]
        return self.decision.to_plain()

    def with_start(self, start: int) -> "AutoCompressor":
        """As new: the step at which a choice begins is part of the decision."""
        return self._with(None)

    def with_notes(self, notes: Any, step: int, *, same_ranks: bool) -> "AutoCompressor":
        """Continue with a saved decision. If the number of ranks has changed, the choice stays in force while it is
        measured anew."""
        if notes is None:
            return self._with(Decision.begin(candidates.simple(self.config)[0], step, self.config.measure_steps))
        decision = Decision.from_plain(notes)
        if not candidates.may_use(self.config, decision.candidate.hook):
            return self._with(Decision.begin(candidates.simple(self.config)[0], step, self.config.measure_steps))
        if not same_ranks:
            watch = Watch(step, step + self.config.measure_steps)
            decision = dataclasses.replace(decision, phase="measuring", watch=watch, extended=0, figures=Figures())
        return self._with(decision)

    def _with(self, decision: Decision | None) -> "AutoCompressor":
        return type(self)(self.config, decision=decision)

    # ---- measuring ---------------------------------------------------------------------------------------------------

    @property
    def watch(self) -> Watch | None:  # type: ignore[override]
        return self.decision.watch

    def observe(self, seen: Seen) -> None:
        self._watcher.compute_with(self.kernel)
        self._watcher.see(seen)

    def reconsidered(self, ranks: Ranks, step: int) -> tuple["AutoCompressor", str]:
        table = ranks.table(self._report().numbers())
        report = slowest(table, len(self._watcher.layouts))
        if report.passes < self.enough_passes or not math.isfinite(report.step_s):
            return self._next(self._extended(step))
        if self.decision.phase == "resting":
            return self._next(self._after_rest(report, step))
        if self.decision.phase == "trying":
            return self._next(self._after_trial(report, step))
        return self._next(self._after_measuring(report, ranks, step))

    def _report(self) -> Report:
        return self._watcher.report()

    def _new_watcher(self) -> Watcher:
        if self.decision.phase != "measuring":
            return Watcher({}, None)
        close = self.config.quality == "close"
        return Watcher(self._probes(), candidates.spectrum(self.config) if close else None)

    def _probes(self) -> dict[str, Compressor[Any]]:
        return candidates.compressors(candidates.probes(self.config))

    def _next(self, decision: Decision) -> tuple["AutoCompressor", str]:
        """This compressor with a new decision, or another one if another candidate is in force from now on; and what to
        say about it."""
        before = self.decision
        said = words.line(decision) if decision.why != before.why else ""
        if decision.candidate == before.candidate and decision.since == before.since:
            self.decision = decision
            if not decision.extended:  # else it goes on with what was measured
                self._watcher = self._new_watcher()
            return self, said
        made = self._with(decision)
        made.kernel = self.kernel
        return made, said

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def _extended(self, step: int) -> Decision:
        """Too few passes made sense on some rank: measure longer, or give up until the next look."""
        now = self.decision
        if now.extended < MOST_EXTENSIONS:
            return dataclasses.replace(now, extended=now.extended + 1, watch=Watch(step, step + TRY_STEPS))
        rested = dataclasses.replace(now, why=words.NO_TIMES, since=step if now.since is None else now.since)
        return self._resting(rested, step)

    def _after_measuring(self, report: Report, ranks: Ranks, step: int) -> Decision:
        now, watcher = self.decision, self._watcher
        seen = watcher.latest
        assert seen is not None  # enough passes were measured
        link = ranks.link()
        probes = candidates.probes(self.config)
        probe_codec_s = dict(zip([each.label for each in probes], report.codec_s, strict=True))
        offered = candidates.simple(self.config)
        if self.config.quality == "close":
            offered += powersgd_candidates(self.config, seen, watcher.energies, ranks)
        if now.candidate not in offered:
            offered = [each for each in offered if each.label != now.candidate.label] + [now.candidate]
        made = candidates.compressors(offered)
        codec_s = codec_times(made, candidates.compressors(probes), probe_codec_s, seen)
        loads = {label: load_of(each, seen, codec_s[label]) for label, each in made.items()}
        label = now.candidate.label
        numels = [layout.numel for layout in watcher.layouts]
        predicted = predicted_s(loads, label, report.step_s, report.computing_s, link, ranks.size, numels)
        figures = Figures(
            step_s=report.step_s,
            waiting_s=report.waiting_s,
            predicted_s=predicted,
            tried_s={label: report.step_s},
            codec_s=codec_s,
            counted_bytes={each: load.counted_bytes for each, load in loads.items()},
            mbit_per_s=link.mbit_per_s,
            latency_ms=link.latency_ms,
            spent_s=report.spent_s,
        )
        return self._decided(dataclasses.replace(now, others=_without(offered, label), figures=figures), step)

    def _after_trial(self, report: Report, step: int) -> Decision:
        now = self.decision
        tried = {**now.figures.tried_s, now.candidate.label: report.step_s}
        figures = dataclasses.replace(now.figures, step_s=report.step_s, waiting_s=report.waiting_s, tried_s=tried)
        return self._decided(dataclasses.replace(now, figures=figures), step)

    def _after_rest(self, report: Report, step: int) -> Decision:
        now = self.decision
        if not has_changed(report.step_s, report.waiting_s, now.figures.step_s, now.figures.waiting_s):
            return self._resting(dataclasses.replace(now, extended=0), step)
        watch = Watch(step, step + self.config.measure_steps)
        return dataclasses.replace(now, phase="measuring", watch=watch, extended=0)

    def _decided(self, now: Decision, step: int) -> Decision:
        """Choose from what is known. A choice that was not in force yet is tried first."""
        known, before = now.known, now.candidate.label
        changes = {label: each.changes for label, each in known.items()}
        first = now.since is None or now.phase == "trying"
        label = choose(now.figures.predicted_s, now.figures.tried_s, changes, before, MARGIN if first else LATER_MARGIN)
        decided = dataclasses.replace(
            now,
            candidate=known[label],
            others=_without(list(known.values()), label),
            since=now.since if label == before and now.since is not None else step,
            extended=0,
            switches=now.switches + (label != before),
            why=words.reason(
                now.figures, expected_s(now.figures.predicted_s, now.figures.tried_s, changes), label, before
            ),
        )
        if label in now.figures.tried_s:
            return self._resting(decided, step)
        return dataclasses.replace(decided, phase="trying", watch=Watch(step, step + TRY_STEPS))

    def _resting(self, decision: Decision, step: int) -> Decision:
        """Rest until the next look: `check_again_every` steps, or as many as measuring anew may cost."""
        every, figures = self.config.check_again_every, decision.figures
        if every is None:
            return dataclasses.replace(decision, phase="resting", watch=None, extended=0)
        cost = figures.spent_s / figures.step_s / MOST_SHARE if figures.step_s > 0 else 0.0
        end = step + max(every, math.ceil(cost) if math.isfinite(cost) else 0)
        return dataclasses.replace(decision, phase="resting", watch=Watch(end - LOOK_STEPS, end), extended=0)


def _without(offered: Sequence[Candidate], label: str) -> tuple[Candidate, ...]:
    return tuple(each for each in offered if each.label != label)
