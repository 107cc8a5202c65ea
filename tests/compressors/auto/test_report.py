"""What ranks have measured, as the slowest of them sees it; clocks that jump; numbers that make no sense."""

from __future__ import annotations

import math

import pytest

from commhooks.compressors.auto.report import Report, combined, count_sound, median_pass

NAN = math.nan


def row(passes: float = 5, step: float = 1.0, waiting: float = 0.2, **more: float) -> list[float]:
    report = Report(5, step, waiting, more.get("spent", 0.1), 3, (0.3, 0.4), (more.get("codec", 0.05), 0.06))
    return [passes, *report.numbers()[1:]]


def test_the_slowest_rank_counts() -> None:
    # The second rank computes ten times longer; the first waits for it.
    slow = [5, 4.0, 0.1, 0.2, 2, 3.0, 4.0, 0.5, 0.02]
    found = combined([[5, 4.0, 3.5, 0.1, 3, 0.3, 0.4, 0.05, 0.06], slow], 2)
    assert found == Report(5, 4.0, 0.1, 0.2, 2, (3.0, 4.0), (0.5, 0.06))
    assert combined([slow], 2) == Report(5, 4.0, 0.1, 0.2, 2, (3.0, 4.0), (0.5, 0.02))


def test_what_ranks_wait_for_the_rehearsals_of_another_is_no_part_of_a_step() -> None:
    assert combined([row(step=1.0), row(step=1.3)], 2).step_s == 1.0


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, -1.0])
def test_what_one_rank_could_not_measure_nobody_knows(bad: float) -> None:
    found = combined([row(), row(codec=bad)], 2)
    assert math.isnan(found.codec_s[0]) and found.codec_s[1] == 0.06 and found.step_s == 1.0
    assert math.isnan(combined([row(step=bad), row()], 2).step_s)
    assert math.isnan(combined([row(), row(waiting=bad)], 2).waiting_s)


def test_passes_are_those_of_the_rank_with_the_fewest() -> None:
    assert combined([row(5), row(2), row(9)], 2).passes == 2
    assert combined([row(5), row(NAN)], 2).passes == 0


def test_clocks_that_jump_spoil_a_pass_and_not_the_median() -> None:
    sound = [(1.0, 0.1, (0.5, 0.4)), (1.2, 0.1, (0.5, 0.4)), (1.1, 0.3, (0.6, 0.4))]
    jumps = [
        (-3600.0, 0.1, (0.5, 0.4)),
        (3600.0, 0.1, (0.5, 0.4)),
        (1.0, -0.1, (0.5, 0.4)),
        (1.0, NAN, (0.5, 0.4)),
        (0.0, 0.1, (0.5, 0.4)),
        (1.0, 0.1, (0.5, -7.0)),
        (1.0, 0.1, (math.inf, 0.4)),
    ]
    assert count_sound(jumps) == 1, "an hour may be true"
    assert median_pass([*jumps, *sound], 2) == pytest.approx((1.15, 0.1, 0.5, 0.4))
    assert all(map(math.isnan, median_pass([jumps[0]], 2))) and len(median_pass([], 2)) == 4
