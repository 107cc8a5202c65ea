"""What follows each phase, by a table: no clocks, no ranks."""

from __future__ import annotations

import dataclasses
import math

import pytest
from prescribed_auto import decided

from commhooks.compressors.auto import candidates, phases
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.decision import Decision, Figures
from commhooks.compressors.auto.phases import LOOK_STEPS, MOST_EXTENSIONS, TRY_STEPS
from commhooks.compressors.auto.report import Report
from commhooks.compressors.observation import Watch

CONFIG = Auto(measure_steps=10, check_again_every=100)
PREDICTED = {"allreduce": 1.0, "bf16": 0.6, "int8": 0.4}
FIGURES = Figures(step_s=1.0, waiting_s=0.5, predicted_s=PREDICTED, tried_s={"allreduce": 1.0}, spent_s=0.1)
OFFERED = candidates.simple(CONFIG)


def report(step_s: float, waiting_s: float = 0.1) -> Report:
    return Report(9, step_s, waiting_s, 0.0, 1, (0.1,), ())


def trying() -> Decision:
    return phases.after_measuring(Decision.begin(OFFERED[0], 0, 10), CONFIG, 10, OFFERED, FIGURES)


def test_a_new_choice_is_tried() -> None:
    made = trying()
    assert (made.candidate.label, made.phase, made.since, made.switches) == ("int8", "trying", 10, 1)
    assert made.watch == Watch(10, 10 + TRY_STEPS) and set(made.known) == set(PREDICTED)


def test_what_was_in_force_is_not_tried() -> None:
    figures = dataclasses.replace(FIGURES, predicted_s={"allreduce": 1.0, "bf16": 1.0, "int8": 1.2})
    made = phases.after_measuring(Decision.begin(OFFERED[0], 0, 10), CONFIG, 10, OFFERED, figures)
    assert (made.candidate.label, made.phase, made.since, made.switches) == ("allreduce", "resting", 10, 0)
    assert made.watch == Watch(110 - LOOK_STEPS, 110)


@pytest.mark.parametrize(
    ("step_s", "label", "phase"),
    [
        (0.4, "int8", "resting"),
        (0.5, "int8", "resting"),
        (0.7, "int8", "resting"),  # bf16, too, would take longer than predicted
        (1.5, "allreduce", "resting"),
    ],
)
def test_after_a_trial(step_s: float, label: str, phase: str) -> None:
    made = phases.after_trial(trying(), CONFIG, 18, report(step_s))
    assert (made.candidate.label, made.phase) == (label, phase)
    assert made.since == (10 if label == "int8" else 18) and made.figures.tried_s["int8"] == step_s


def test_after_a_trial_that_failed_a_look_compares_with_what_is_in_force() -> None:
    """And not with the trial: it would measure, try and fail again after each rest."""
    failed = phases.after_trial(trying(), CONFIG, 18, report(1.5))
    assert failed.candidate.label == "allreduce"
    for waiting_s in (0.1, 0.5):  # all-reduce waits longer than the trial did
        assert phases.after_rest(failed, CONFIG, 118, report(1.0, waiting_s)).phase == "resting"
    assert phases.after_rest(failed, CONFIG, 118, report(1.4)).phase == "measuring"


def test_a_trial_that_cannot_be_measured_is_taken_back() -> None:
    now = trying()
    for turn in range(MOST_EXTENSIONS):
        now = phases.extended(now, CONFIG, 18 + TRY_STEPS * turn)
        assert now.phase == "trying" and now.candidate.label == "int8"
    now = phases.extended(now, CONFIG, 60)
    assert (now.phase, now.since, now.candidate.label, now.switches) == ("resting", 60, "allreduce", 2)
    assert now.why == "int8 could not be measured" and now.figures.step_s == 1.0
    assert set(now.known) == set(PREDICTED)


def test_every_candidate_is_tried_once_at_most() -> None:
    """However the times come out, it comes to rest."""
    for times in ([0.9, 0.9, 0.9], [2.0, 2.0, 2.0], [0.59, 0.1, 3.0], [0.41, 0.99, 0.5]):
        now, step = trying(), 10
        for turn, step_s in enumerate(times):
            if now.phase != "trying":
                break
            step += TRY_STEPS
            now = phases.after_trial(now, CONFIG, step, report(step_s))
            assert turn < len(OFFERED)
        assert now.phase == "resting"
        known = now.figures.tried_s
        assert known[now.candidate.label] <= 1.03 * min(known.values())


@pytest.mark.parametrize(
    ("step_s", "waiting_s", "phase"),
    [(1.1, 0.5, "resting"), (1.3, 0.5, "measuring"), (1.0, 0.1, "measuring"), (math.nan, 0.5, "resting")],
)
def test_after_a_rest(step_s: float, waiting_s: float, phase: str) -> None:
    now = decided("int8", since=10, figures=FIGURES)
    made = phases.after_rest(now, CONFIG, 110, report(step_s, waiting_s))
    assert made.phase == phase and made.candidate == now.candidate and made.since == 10
    assert made.watch == (Watch(110, 120) if phase == "measuring" else Watch(210 - LOOK_STEPS, 210))


def test_where_nothing_was_known_before_a_rest_it_measures() -> None:
    now = decided("allreduce", since=10)  # the times never made sense
    assert phases.after_rest(now, CONFIG, 110, report(1.0)).phase == "measuring"


def test_it_looks_again_later_where_measuring_is_expensive() -> None:
    expensive = dataclasses.replace(FIGURES, spent_s=30.0)  # of steps of one second: 1 % of 3000 steps
    made = phases.resting(decided("int8", since=0, figures=expensive), CONFIG, 50)
    assert made.watch is not None and made.watch.end == pytest.approx(3050, abs=1)
    never = dataclasses.replace(CONFIG, check_again_every=None)
    assert phases.resting(decided("int8", since=0), never, 50).watch is None


def test_times_that_never_make_sense_end_the_measuring() -> None:
    now = Decision.begin(OFFERED[0], 0, 10)
    for turn in range(MOST_EXTENSIONS):
        now = phases.extended(now, CONFIG, 10 + turn)
        assert now.phase == "measuring" and now.watch == Watch(10 + turn, 10 + turn + TRY_STEPS)
    now = phases.extended(now, CONFIG, 99)
    assert (now.phase, now.since, now.candidate.label, now.extended) == ("resting", 99, "allreduce", 0)
    assert "make no sense" in now.why
