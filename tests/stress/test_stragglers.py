"""A rank that is stopped may go on, and a killed one is named."""

import pytest

from tests.stress.stragglers import LATE_RANK, Trouble, outcomes

SHORT = {"steps": 26, "step_s": 0.0}


@pytest.mark.parametrize("hook", ["powerSGD", "diloco, delay"])
def test_a_rank_that_is_stopped_for_a_while_changes_nothing(run_ranks, hook):
    even, stopped = (
        outcomes(run_ranks, hook, trouble, world_size=2, **SHORT)
        for trouble in (Trouble(), Trouble(stopped_s=1.0))
    )
    assert stopped[1 - LATE_RANK].longest_s > 0.5
    assert {outcome.weights for outcomes in (even, stopped) for outcome in outcomes.values()} == {
        even[0].weights
    }
    assert not any(outcome.error for outcome in (*even.values(), *stopped.values()))


def test_a_killed_rank_is_named(run_ranks):
    killed = outcomes(run_ranks, "powerSGD", Trouble(killed=True), **SHORT)
    assert sorted(killed) == [0, 2]
    for rank, outcome in killed.items():
        assert (
            f"rank {rank} of 3" in outcome.error
            and f"rank {LATE_RANK} has ended or hangs" in outcome.error
        )
        assert outcome.longest_s < 10
