"""A short soak; `make soak` runs the long one."""

import pytest

from tests.stress import soak

STEPS = 120


@pytest.mark.parametrize("hook", ["powerSGD", "diloco"])  # int8 quantises as DiLoCo does
def test_memory_replicas_residuals_and_bits_stay_as_they_should(run_ranks, hook):
    ranks, again = soak.run(run_ranks, hook, STEPS, comparisons=6)
    assert soak.problems(hook, ranks, again, STEPS) == []
