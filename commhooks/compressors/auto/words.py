"""Sentences about decisions, with their figures."""

import math
from collections.abc import Mapping

from commhooks.compressors.auto.candidates import PLAIN
from commhooks.compressors.auto.decision import Decision, Figures
from commhooks.compressors.units import Unit

NO_TIMES = "the measured times make no sense, so nothing changes"


def not_measured(label: str) -> str:
    """Why another candidate is in force again after the trial of this one."""
    return f"{label} could not be measured"


def reason(figures: Figures, times: Mapping[str, float], label: str, before: str) -> str:
    """Why `label` was chosen where `before` was in force. `times`: seconds of a step by label; see `expected_s`."""
    said = ["nothing helps here"] if label == PLAIN else []
    said.append(f"a step takes {_time(times, label, figures)}")
    if label != before:
        said[-1] += f", {_time(times, before, figures)} with {before}"
    others = [each for each in times if each not in (label, before) and math.isfinite(times[each])]
    if others:
        fastest = min(others, key=lambda each: times[each])
        said.append(f"the best of the others is {fastest}, {_time(times, fastest, figures)}")
    if math.isfinite(figures.mbit_per_s):
        said.append(f"{figures.mbit_per_s:.4g} Mbit/s and {figures.latency_ms:.3g} ms between the ranks")
    return "; ".join(said)


def line(decision: Decision) -> str:
    """What rank 0 says after a decision."""
    label, figures = decision.candidate.label, decision.figures
    sent = figures.counted_bytes.get(label)
    size = "" if sent is None else f", {Unit.of(sent).text(sent)} per step and rank"
    return f"auto: {label} from step {decision.since} on{size}: {decision.why}"


def state(decision: Decision) -> str:
    """The state of things in a few words, for the line at the first backward pass."""
    if decision.since is not None:
        return f"{decision.candidate.label} since step {decision.since}: {decision.why}"
    end = decision.watch.end if decision.watch is not None else 0
    return f"plain all-reduce, measured until it decides at step {end}"


def _time(times: Mapping[str, float], label: str, figures: Figures) -> str:
    seconds = times.get(label, math.nan)
    if not math.isfinite(seconds):
        return "an unknown time"
    how = "measured" if label in figures.tried_s else "predicted"
    return f"{1000 * seconds:.4g} ms ({how})"
