"""What follows each phase: from a decision and what was measured, the next decision. Pure; equal on all ranks that have
the same numbers."""

import dataclasses
import math
from collections.abc import Sequence

from commhooks.compressors.auto import words
from commhooks.compressors.auto.candidates import Candidate, allowed, excluding, simple
from commhooks.compressors.auto.choice import LATER_MARGIN, MARGIN, choose, expected_s, has_changed
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.decision import Decision, Figures
from commhooks.compressors.auto.report import Report
from commhooks.compressors.observation import Watch

TRY_STEPS = 8
"""Steps with a new choice that are measured."""
LOOK_STEPS = 8
"""Steps that are measured at the end of a rest."""
MOST_SHARE = 0.01
"""Share of the time that measuring may take after the first decision."""
MOST_EXTENSIONS = 5
"""How many times in a row a phase is extended."""


def extended(now: Decision, config: Auto, step: int) -> Decision:
    """Too few passes made sense on some rank: measure longer, or give up until the next look."""
    if now.extended < MOST_EXTENSIONS:
        return dataclasses.replace(now, extended=now.extended + 1, watch=Watch(step, step + TRY_STEPS))
    if now.phase == "trying" and now.figures.tried_s:
        return _taken_back(now, config, step)
    since = step if now.since is None else now.since
    return resting(dataclasses.replace(now, why=words.NO_TIMES, since=since), config, step)


def _taken_back(now: Decision, config: Auto, step: int) -> Decision:
    """The decision after a trial that could not be measured: the fastest of the candidates that were measured."""
    tried, known = now.figures.tried_s, now.known
    label = min((each for each in tried if each in known), key=lambda each: tried[each], default=now.candidate.label)
    made = dataclasses.replace(
        now,
        candidate=known[label],
        others=without(list(known.values()), label),
        since=step,
        switches=now.switches + 1,
        why=words.not_measured(now.candidate.label),
        figures=_measured_as(now.figures, label),
    )
    return resting(made, config, step)


def after_measuring(now: Decision, config: Auto, step: int, offered: Sequence[Candidate], figures: Figures) -> Decision:
    """Choose among `offered`, whose times are predicted in `figures`."""
    others = without(offered, now.candidate.label)
    return decided(dataclasses.replace(now, others=others, figures=figures), config, step)


def after_trial(now: Decision, config: Auto, step: int, report: Report) -> Decision:
    """The choice was measured: keep it, or choose another."""
    tried = {**now.figures.tried_s, now.candidate.label: report.step_s}
    figures = dataclasses.replace(now.figures, step_s=report.step_s, waiting_s=report.waiting_s, tried_s=tried)
    return decided(dataclasses.replace(now, figures=figures), config, step)


def after_rest(now: Decision, config: Auto, step: int, report: Report) -> Decision:
    """Rest on, or measure anew if the times have changed by a lot, or none were known."""
    known = math.isfinite(now.figures.step_s)
    if known and not has_changed(report.step_s, report.waiting_s, now.figures.step_s, now.figures.waiting_s):
        return resting(now, config, step)
    return _measuring(now, config, step)


def resumed(saved: Decision, config: Auto, step: int, *, same_ranks: bool) -> Decision:
    """Go on with a decision from a checkpoint. The choice stays in force, and is measured anew if the number of ranks
    or what may be chosen has changed. A choice that the options no longer allow is dropped at once: that is also
    PowerSGD whose ranks were chosen for another target, or for other layers."""
    usable = {label: excluding(each, config) for label, each in saved.known.items() if allowed(each, config)}
    candidate = usable.pop(saved.candidate.label, None)
    if candidate is None:
        return Decision.begin(simple(config)[0], step, config.measure_steps)
    others = tuple(usable.values())
    figures = saved.figures.of({candidate.label, *usable}) if same_ranks else Figures()
    now = dataclasses.replace(saved, candidate=candidate, others=others, figures=figures)
    if not same_ranks:
        return _measuring(now, config, step)
    if now.phase == "measuring":
        return now
    missing = {each.label for each in simple(config)} - now.known.keys()
    # Without others nothing could be measured: the next look will try again.
    if saved.others and (missing or now.known != saved.known):
        return _measuring(now, config, step)
    anew = resting(now, config, step)
    if now.phase == "resting" and (now.watch is None or anew.watch is None or now.watch.end > anew.watch.end):
        return anew
    return now


def _measuring(now: Decision, config: Auto, step: int) -> Decision:
    watch = Watch(step, step + config.measure_steps)
    return dataclasses.replace(now, phase="measuring", watch=watch, extended=0)


def decided(now: Decision, config: Auto, step: int) -> Decision:
    """Choose from what is known. A choice that was not in force yet is tried first."""
    known, before = now.known, now.candidate.label
    changes = {label: each.changes for label, each in known.items()}
    predicted, tried = now.figures.predicted_s, now.figures.tried_s
    first = now.since is None or now.phase == "trying"
    label = choose(predicted, tried, changes, before, MARGIN if first else LATER_MARGIN)
    made = dataclasses.replace(
        now,
        candidate=known[label],
        others=without(list(known.values()), label),
        figures=now.figures if label == before else _measured_as(now.figures, label),
        since=now.since if label == before and now.since is not None else step,
        extended=0,
        switches=now.switches + (label != before),
        why=words.reason(now.figures, expected_s(predicted, tried, changes), label, before),
    )
    if label in tried:
        return resting(made, config, step)
    return dataclasses.replace(made, phase="trying", watch=Watch(step, step + TRY_STEPS))


def _measured_as(figures: Figures, label: str) -> Figures:
    """With the step of the candidate that comes into force, if it was measured: it is what a later look compares with.
    How long that one waited is not kept."""
    if label not in figures.tried_s:
        return figures
    return dataclasses.replace(figures, step_s=figures.tried_s[label], waiting_s=math.nan)


def resting(now: Decision, config: Auto, step: int) -> Decision:
    """Rest until the next look: `check_again_every` steps, or as many as measuring anew may cost."""
    every, figures = config.check_again_every, now.figures
    if every is None:
        return dataclasses.replace(now, phase="resting", watch=None, extended=0)
    cost = figures.spent_s / figures.step_s / MOST_SHARE if figures.step_s > 0 else 0.0
    end = step + max(every, math.ceil(cost) if math.isfinite(cost) else 0)
    return dataclasses.replace(now, phase="resting", watch=Watch(end - LOOK_STEPS, end), extended=0)


def without(offered: Sequence[Candidate], label: str) -> tuple[Candidate, ...]:
    """All but the one with that label."""
    return tuple(each for each in offered if each.label != label)
