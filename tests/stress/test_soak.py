"""A short soak; `make soak` runs the long one."""

from tests.stress import soak

STEPS = 300


def test_memory_replicas_and_bits(run_ranks):
    first, second = (run_ranks(soak.train, STEPS) for _ in range(2))
    assert soak.problems(first, second, STEPS) == []
