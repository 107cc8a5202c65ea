"""The choice, by a table: which candidate, given predicted and measured times."""

from __future__ import annotations

import math

import pytest

from commhooks.compressors.auto.choice import LATER_MARGIN, choose, expected_s, has_changed

CHANGES = {"allreduce": 0.0, "bf16": 0.5, "int8": 1.2, "int4": 1.6, "powerSGD": 3.0}
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("predicted", "tried", "now", "expected"),
    [
        # The fastest.
        ({"allreduce": 1.0, "bf16": 0.6, "int8": 0.4}, {"allreduce": 1.0}, "allreduce", "int8"),
        # Among those that are about as fast, the one that changes least.
        ({"allreduce": 1.0, "bf16": 0.41, "int8": 0.4}, {"allreduce": 1.0}, "allreduce", "bf16"),
        ({"allreduce": 1.0, "bf16": 0.42, "int8": 0.4}, {"allreduce": 1.0}, "allreduce", "int8"),
        # Nothing helps.
        ({"allreduce": 1.0, "bf16": 1.0, "int8": 1.2}, {"allreduce": 1.0}, "allreduce", "allreduce"),
        ({"allreduce": 1.0, "bf16": 0.98, "int8": 1.2}, {"allreduce": 1.0}, "allreduce", "allreduce"),
        # What was tried counts as measured.
        ({"allreduce": 1.0, "int8": 0.4}, {"allreduce": 1.0, "int8": 1.1}, "int8", "allreduce"),
        ({"allreduce": 1.0, "int8": 0.4}, {"allreduce": 1.0, "int8": 0.7}, "int8", "int8"),
        # int8 took twice as long as predicted: so will int4.
        ({"allreduce": 1.0, "int8": 0.4, "int4": 0.39}, {"allreduce": 1.0, "int8": 0.8}, "int8", "int8"),
        # The times of a candidate make no sense.
        ({"allreduce": 1.0, "int8": NAN, "int4": -1.0, "bf16": 0.9}, {"allreduce": 1.0}, "allreduce", "bf16"),
        ({"allreduce": 1.0, "int8": 0.0, "bf16": INF}, {"allreduce": 1.0}, "allreduce", "allreduce"),
        # Nothing is known about the one in force, or about anything.
        ({"allreduce": NAN, "int8": 0.1}, {}, "allreduce", "allreduce"),
        ({}, {}, "allreduce", "allreduce"),
        # The one in force is among the equally fast ones, and changes more.
        ({"allreduce": 0.41, "int8": 0.4}, {"int8": 0.4}, "int8", "int8"),
    ],
)
def test_choose(predicted: dict[str, float], tried: dict[str, float], now: str, expected: str) -> None:
    assert choose(predicted, tried, CHANGES, now) == expected
    assert choose(dict(reversed(predicted.items())), tried, CHANGES, now) == expected


def test_a_later_change_has_to_gain_more() -> None:
    predicted = {"allreduce": 1.0, "bf16": 0.95}
    assert choose(predicted, {}, CHANGES, "allreduce") == "bf16"
    assert choose(predicted, {}, CHANGES, "allreduce", LATER_MARGIN) == "allreduce"


def test_a_later_change_gains_enough_with_another_than_the_gentlest() -> None:
    predicted = {"allreduce": 1.0, "bf16": 0.92, "int8": 0.9, "int4": 0.9}
    assert choose(predicted, {}, CHANGES, "allreduce", LATER_MARGIN) == "int8"
    assert choose(predicted, {}, CHANGES, "allreduce") == "bf16"


def test_an_overrun_concerns_what_compresses_and_was_not_tried() -> None:
    predicted = {"allreduce": 1.0, "int8": 0.4, "int4": 0.3}
    found = expected_s(predicted, {"allreduce": 1.5, "int8": 0.8}, CHANGES)
    assert found == pytest.approx({"allreduce": 1.5, "int8": 0.8, "int4": 0.6})
    # Being faster than predicted promises nothing.
    assert expected_s(predicted, {"int8": 0.1}, CHANGES) == pytest.approx({"allreduce": 1.0, "int8": 0.1, "int4": 0.3})


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        ((1.0, 0.1), (1.0, 0.1), False),
        ((1.2, 0.3), (1.0, 0.1), False),
        ((1.3, 0.1), (1.0, 0.1), True),
        ((0.7, 0.1), (1.0, 0.1), True),
        ((1.0, 0.4), (1.0, 0.1), True),  # another job on the network, and a faster forward pass
        ((NAN, 0.1), (1.0, 0.1), False),
        ((0.0, 0.1), (1.0, 0.1), False),
        ((1.3, NAN), (1.0, 0.1), True),
        ((5.0, 0.1), (NAN, 0.1), False),
    ],
)
def test_has_changed(now: tuple[float, float], then: tuple[float, float], expected: bool) -> None:
    assert has_changed(*now, *then) is expected
