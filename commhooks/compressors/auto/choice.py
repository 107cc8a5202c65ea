"""Choose a candidate from predicted and measured times. Pure, and equal on all ranks that have the same numbers."""

import math
from collections.abc import Mapping

MARGIN = 1.03
"""Candidates whose steps differ by less than this factor are equally fast. It is also what a change has to gain."""
LATER_MARGIN = 1.1
"""What a later change has to gain: a choice that swings to and fro is worse than one that is a little slower."""


def choose(
    predicted_s: Mapping[str, float],
    tried_s: Mapping[str, float],
    changes: Mapping[str, float],
    now: str,
    margin: float = MARGIN,
) -> str:
    """The label of the candidate to use.

    Among those that are about as fast as the fastest and gain at least `margin`, the one that changes the gradients
    least; the one in force if there are none. Candidates without a usable time are left out.

    Args:
        predicted_s: seconds of a step, by label.
        tried_s: the same as measured, where a candidate was in force already: it counts, not the prediction.
        changes: by label, how much the candidate changes the gradients; see `Trial`.
        now: the candidate in force.
    """
    times = {label: each for label, each in expected_s(predicted_s, tried_s, changes).items() if _usable(each)}
    if not times or now not in times:
        return now
    longest = min(MARGIN * min(times.values()), times[now] / margin)
    about = [label for label, seconds in times.items() if seconds <= longest]
    # The first of equals is the same on all ranks: the order of the labels is.
    return min(about, key=lambda label: (changes[label], times[label]), default=now)


def expected_s(
    predicted_s: Mapping[str, float], tried_s: Mapping[str, float], changes: Mapping[str, float]
) -> dict[str, float]:
    """Seconds of a step by label: measured, or predicted. If candidates that compress took longer than predicted, the
    untried ones that do are expected to do so, too."""
    overruns = [
        tried_s[label] / predicted_s[label]
        for label in tried_s
        if changes.get(label, 0) > 0 and _usable(tried_s[label]) and _usable(predicted_s.get(label, math.nan))
    ]
    factor = max(1.0, *overruns) if overruns else 1.0
    return {
        label: tried_s[label] if _usable(tried_s.get(label, math.nan)) else seconds * (factor if changes[label] else 1)
        for label, seconds in predicted_s.items()
    }


def has_changed(step_s: float, waiting_s: float, then_step_s: float, then_waiting_s: float, by: float = 0.25) -> bool:
    """Whether a step, or its waiting, takes so much longer or shorter than then (by a share of the step) that the
    decision should be made anew. Numbers that make no sense say nothing."""
    if not all(_usable(each) for each in (step_s, then_step_s)):
        return False
    waited = abs(waiting_s - then_waiting_s) if math.isfinite(waiting_s) and math.isfinite(then_waiting_s) else 0.0
    return max(abs(step_s - then_step_s), waited) > by * then_step_s


def _usable(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0
