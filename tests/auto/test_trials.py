"""Which candidate is tried next, and which is chosen, by tables: no clocks, no ranks."""

import math
from collections.abc import Mapping

import pytest

from commhooks.auto import trials
from commhooks.auto.options import Auto, choose
from commhooks.auto.trials import MOST_EXTENSIONS, TRIAL_STEPS, WARM_UP, Decision, Watch
from tests.support.prescribed_auto import TRIAL, decided

NAN, INF = math.nan, math.inf
CONFIG = Auto(quality="close", measure_steps=10)
OFFERED = [candidate for candidate in CONFIG.candidates if candidate.hook != "powerSGD"]
KNOWN = {candidate.label: candidate for candidate in OFFERED}
SENT = {"allreduce": 100.0, "bf16": 50.0, "int8": 26.0, "int4": 14.0}


@pytest.mark.parametrize(
    ("times", "now", "expected"),
    [
        # The fastest.
        ({"allreduce": 1.0, "bf16": 0.6, "int8": 0.4}, "allreduce", "int8"),
        # Among those that are about as fast, the one that changes least.
        ({"allreduce": 1.0, "bf16": 0.43, "int8": 0.4}, "allreduce", "bf16"),
        ({"allreduce": 1.0, "bf16": 0.45, "int8": 0.4}, "allreduce", "int8"),
        # Nothing helps, or not by the margin.
        ({"allreduce": 1.0, "bf16": 1.0, "int8": 1.2}, "allreduce", "allreduce"),
        ({"allreduce": 1.0, "bf16": 0.92, "int8": 1.2}, "allreduce", "allreduce"),
        # The gentlest of those that gain enough.
        ({"allreduce": 1.0, "bf16": 0.92, "int8": 0.9, "int4": 0.89}, "allreduce", "int8"),
        # The times of a candidate make no sense.
        ({"allreduce": 1.0, "int8": NAN, "int4": -1.0, "bf16": 0.9}, "allreduce", "bf16"),
        ({"allreduce": 1.0, "int8": 0.0, "bf16": INF}, "allreduce", "allreduce"),
        # Nothing is known about the one in force, or about anything.
        ({"allreduce": NAN, "int8": 0.1}, "allreduce", "allreduce"),
        ({}, "allreduce", "allreduce"),
        # The one in force is among the equally fast ones, and changes more.
        ({"allreduce": 0.41, "int8": 0.4}, "int8", "int8"),
        ({"allreduce": 0.35, "int8": 0.4}, "int8", "allreduce"),
    ],
)
def test_the_fastest_candidate_that_is_good_enough_is_chosen(
    times: dict[str, float], now: str, expected: str
) -> None:
    assert choose(times, KNOWN, now) == expected
    assert choose(dict(reversed(times.items())), KNOWN, now) == expected


def _begun(step_s: float = 1.0, config: Auto = CONFIG) -> Decision:
    """After ten steps of all-reduce."""
    return trials.after_measuring(
        trials.begin(config, 0),
        10,
        step_s,
        [candidate for candidate in OFFERED if candidate in config.candidates],
        SENT,
    )


def _run(times: Mapping[str, float], config: Auto = CONFIG) -> tuple[list[str], Decision]:
    """The labels that were tried, and the decision."""
    now = _begun(times["allreduce"], config)
    step = 10
    labels = []
    while now.phase == "trying":
        labels.append(now.candidate.label)
        assert now.since == step and now.watch == Watch(step + WARM_UP, step + TRIAL)
        step += TRIAL
        now = trials.after_trial(now, step, times[now.candidate.label])
    assert now.phase == "decided" and now.watch is None
    return labels, now


@pytest.mark.parametrize(
    ("times", "tried", "chosen"),
    [
        # The network is nearly all of the step: the bytes of others alone would take longer.
        ({"allreduce": 10.0, "int4": 1.4}, ["int4"], "int4"),
        ({"allreduce": 10.0, "int4": 3.0, "int8": 2.7}, ["int4", "int8"], "int8"),
        # It is hidden, or fast: nobody knows from bytes what a step takes.
        (
            {"allreduce": 1.0, "int4": 0.95, "int8": 0.9, "bf16": 0.8},
            ["int4", "int8", "bf16"],
            "bf16",
        ),
        # What computes long says nothing about the network.
        (
            {"allreduce": 1.0, "int4": 2.0, "int8": 1.9, "bf16": 1.02},
            ["int4", "int8", "bf16"],
            "allreduce",
        ),
        # Steps of 10 ms.
        (
            {"allreduce": 0.0109, "int4": 0.0119, "int8": 0.0149, "bf16": 0.0089},
            ["int4", "int8", "bf16"],
            "bf16",
        ),
    ],
)
def test_candidates_are_tried_in_turn_and_one_is_chosen(
    times: dict[str, float], tried: list[str], chosen: str
) -> None:
    labels, now = _run(times)
    assert labels == tried and now.candidate.label == chosen
    assert dict(now.tried_s) == {"allreduce": times["allreduce"]} | {
        label: times[label] for label in tried
    }
    untried = SENT.keys() - now.tried_s.keys()
    assert ("not tried, because their bytes alone" in now.why) == bool(untried)
    assert all(label in now.why for label in untried)
    assert set(now.candidates) == set(SENT) and Decision.from_plain(now.to_plain()) == now


def test_what_sends_as_much_as_all_reduce_is_not_tried() -> None:
    """Of a model in bfloat16; and int4 where everything is excluded. Afterwards, with int8 in
    force, neither.
    """
    sent = {"allreduce": 50.0, "bf16": 50.0, "int8": 26.0, "int4": 50.0}
    now = trials.after_measuring(trials.begin(CONFIG, 0), 10, 1.0, OFFERED, sent)
    assert (now.candidate.label, now.phase) == ("int8", "trying")
    now = trials.after_trial(now, 20, 0.5)
    assert (now.candidate.label, now.phase) == ("int8", "decided") and Decision.from_plain(
        now.to_plain()
    ) == now
    assert (
        "not tried, because they send no less of this model: bf16, int4" in now.why
        and "alone" not in now.why
    )
    now = trials.after_measuring(now, 130, 1.0, OFFERED, sent)
    # which is in force now
    assert (now.candidate.label, trials.worth_trying(now)) == (
        "allreduce",
        ["allreduce"],
    )


def test_a_trial_without_a_time_ends_the_trials() -> None:
    now = _begun()
    for turn in range(MOST_EXTENSIONS):
        now = trials.extended(now, 18 + TRIAL_STEPS * turn)
        assert now.phase == "trying" and now.candidate.label == "int4" and now.watch is not None
        assert (now.watch.begin, now.watch.end) == (10 + WARM_UP, 18 + TRIAL_STEPS * (turn + 1))
    now = trials.extended(now, 60)
    assert (now.phase, now.since, now.candidate.label, now.switches) == (
        "decided",
        60,
        "allreduce",
        2,
    )
    assert "int4 could not be measured" in now.why and set(now.candidates) == set(SENT)
    assert Decision.from_plain(now.to_plain()).to_plain() == now.to_plain()


def test_times_that_never_make_sense_end_the_measuring() -> None:
    now = trials.begin(CONFIG, 0)
    assert now.watch == Watch(WARM_UP, 10)
    for turn in range(MOST_EXTENSIONS):
        now = trials.extended(now, 10 + turn)
        assert now.phase == "measuring" and now.watch == Watch(WARM_UP, 10 + turn + TRIAL_STEPS)
    now = trials.extended(now, 99)
    assert (now.phase, now.since, now.candidate.label, now.extended) == (
        "decided",
        99,
        "allreduce",
        0,
    )
    assert "make no sense" in now.why


def test_trials_after_a_resume_compare_with_the_choice_in_force() -> None:
    now = decided("int8", since=10, tried_s={"allreduce": 3.0, "int8": 1.0}, counted_bytes=SENT)
    now = trials.resumed(now, CONFIG, 110, same_ranks=False)
    assert (now.phase, now.candidate.label, now.since) == ("measuring", "int8", 10)
    now = trials.after_measuring(now, 120, 2.0, OFFERED, SENT)
    assert now.candidate.label == "int4" and list(now.tried_s) == ["int8"]
    now = trials.after_trial(now, 130, 2.1)
    # nothing is won by sending less: the network is not what takes long
    assert now.candidate.label == "bf16"
    now = trials.after_trial(now, 140, 1.85)
    now = trials.after_trial(now, 150, 1.9)
    # nothing gains a tenth
    assert (now.candidate.label, now.phase, now.since) == (
        "int8",
        "decided",
        150,
    )
