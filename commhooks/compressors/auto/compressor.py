"""`hook="auto"` as a compressor: delegates each bucket to the candidate in force, and decides which that is.

    measuring   plain all-reduce; codecs are rehearsed on the real gradients      -> predict, choose
    trying      the new choice is in force and measured                           -> keep it, or choose another
    resting     until the next look: has the time of a step changed by a lot?     -> rest on, or measure again

What a phase has measured is exchanged at its end, before the first bucket of a pass, and every rank decides from the
same table. The decision is saved; see `Decision`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commhooks.compressors.auto import candidates, phases, words
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.decision import Decision, Figures
from commhooks.compressors.auto.loads import codec_times, load_of
from commhooks.compressors.auto.per_layer import powersgd_candidates
from commhooks.compressors.auto.prediction import Network, predicted_s
from commhooks.compressors.auto.report import Report, combined
from commhooks.compressors.auto.watcher import Watcher
from commhooks.compressors.base import RESIDUAL, Compressor, Exchange, State, StateField, StepInfo, Trial
from commhooks.compressors.config import LARGEST_STEP, HookConfig
from commhooks.compressors.kernel import TORCH, Kernel, KernelsHere
from commhooks.compressors.native.choice import NAME as NATIVE
from commhooks.compressors.observation import Ranks, Seen, Watch
from commhooks.compressors.plan import MemoryPlan, ParameterInfo, UnitPlan
from commhooks.gradients.layout import BucketLayout


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
    def computes_from_received(self) -> bool:  # type: ignore[override]
        return any(each.computes_from_received for each in self._probes().values())

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

    def never_acts(self, total_steps: int) -> str:
        watch = self.decision.watch
        if self.decision.since is not None or watch is None or watch.end < total_steps:
            return ""
        return (
            f"auto decides after {watch.end} steps, but this run has only {total_steps}: nothing will be compressed. "
            "Set measure_steps to a smaller number, or name the hook."
        )

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
        """Continue with a saved decision; see `phases.resumed`."""
        if notes is None:
            return self._with(Decision.begin(candidates.simple(self.config)[0], step, self.config.measure_steps))
        return self._with(phases.resumed(Decision.from_plain(notes), self.config, step, same_ranks=same_ranks))

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
        numbers = self._report().numbers()
        alike = len({row[0] for row in ranks.table([len(numbers)])}) == 1
        if not alike:  # a rank has missed passes, or seen other buckets
            return self._next(phases.extended(self.decision, self.config, step))
        report = combined(ranks.table(numbers), len(self._watcher.layouts))
        if report.passes < self.enough_passes or not math.isfinite(report.step_s):
            return self._next(phases.extended(self.decision, self.config, step))
        if self.decision.phase == "resting":
            return self._next(phases.after_rest(self.decision, self.config, step, report))
        if self.decision.phase == "trying":
            return self._next(phases.after_trial(self.decision, self.config, step, report))
        if report.rehearsals == 0 and self.decision.extended < phases.MOST_EXTENSIONS:
            return self._next(phases.extended(self.decision, self.config, step))
        return self._next(self._after_measuring(report, ranks, step))

    @property
    def _low_rank(self) -> bool:
        """Whether the averaged gradients are approximations: which ranks they need cannot be seen in them."""
        return self.decision.candidate.hook == candidates.POWERSGD

    def _report(self) -> Report:
        return self._watcher.report()

    def _new_watcher(self) -> Watcher:
        if self.decision.phase != "measuring":
            return Watcher({}, None)
        by_energy = self.config.target is not None and not self._low_rank
        return Watcher(self._probes(), candidates.spectrum(self.config) if by_energy else None)

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

    def _after_measuring(self, report: Report, ranks: Ranks, step: int) -> Decision:
        """Predict the step with each candidate, and choose."""
        now, watcher = self.decision, self._watcher
        seen = watcher.latest
        assert seen is not None  # enough passes were measured
        network = Network(ranks.link(), ranks.size, ranks.together(), ranks.backend)
        probes = candidates.probes(self.config)
        probe_codec_s = dict(zip([each.label for each in probes], report.codec_s, strict=True))
        offered = candidates.simple(self.config)
        if self.config.quality == "close" and not self._low_rank:
            offered += powersgd_candidates(self.config, seen, watcher.energies, ranks)
        if now.candidate not in offered:
            offered = [each for each in offered if each.label != now.candidate.label] + [now.candidate]
        made = candidates.compressors(offered)
        codec_s = codec_times(made, candidates.compressors(probes), probe_codec_s, seen)
        loads = {label: load_of(each, seen, codec_s[label]) for label, each in made.items()}
        label = now.candidate.label
        numels = [0 if layout.sparse else layout.numel for layout in watcher.layouts]
        predicted = predicted_s(loads, label, report.step_s, report.computing_s, network, numels)
        figures = Figures(
            step_s=report.step_s,
            waiting_s=report.waiting_s,
            predicted_s=predicted,
            tried_s={label: report.step_s},
            codec_s=codec_s,
            counted_bytes={each: load.counted_bytes for each, load in loads.items()},
            mbit_per_s=network.link.mbit_per_s,
            latency_ms=network.link.latency_ms,
            spent_s=report.spent_s + network.link.took_s,
        )
        return phases.after_measuring(now, self.config, step, offered, figures)
