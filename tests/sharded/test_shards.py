"""Trainings with compressed shards equal the oracle to the bit."""

import os
from typing import Any

import pytest

from tests.sharded.shards_cases import Case, compared, random_case
from tests.support.features import custom_collectives

pytestmark = custom_collectives

UNITS = (
    ((24, 20), (24,)),
    ((33, 17), (3, 4, 5), (1, 12)),  # uneven, and nothing for the last rank
    ((16, 40),),
    ((20, 24), (7,)),
)


@pytest.mark.parametrize("dtypes", ["float32", "float64", "bf16", "bf16, float32 sums", "fp16"])
def test_each_precision_equals_the_oracle(run_ranks: Any, dtypes: str) -> None:
    cases = [Case(1, 2, UNITS, dtypes), Case(2, 2, UNITS, dtypes, weights="bf16", gradients="bf16")]
    assert run_ranks(compared, cases, world_size=2) == [[], []]


EVEN = (((24, 20), (24,)), ((32, 16), (8, 4, 5)), ((16, 40),))
SPECIAL = {
    # gloo itself refuses PREMUL_SUM; every unit is compressed
    "PREMUL_SUM": [Case(3, 2, UNITS, divide=3.0), Case(4, 2, UNITS, "bf16", divide=2.0)],
    "SUM": [Case(12, 2, UNITS, force_sum=True), Case(13, 2, UNITS, "bf16", force_sum=True)],
    "accumulated": [Case(5, 2, UNITS, "bf16, float32 sums", accumulated=2, reshard=False)],
    "a frozen unit": [Case(10, 2, UNITS, frozen=((2, 0), (1, 1)))],
    "by columns": [Case(11, 2, UNITS, columns=((0, 0), (3, 0)))],
    "only weights": [Case(6, 2, UNITS, gradients=None, reshard=True)],
    "only gradients": [Case(7, 2, UNITS, weights=None)],
    "not finite": [Case(8, 2, UNITS, nonfinite=(1, 1, 2)), Case(9, 2, UNITS, nonfinite=(0, 0, 0))],
}


@pytest.mark.parametrize("name", SPECIAL)
def test_each_option_equals_the_oracle(run_ranks: Any, name: str) -> None:
    assert run_ranks(compared, SPECIAL[name], world_size=2) == [[], []]


def test_between_nodes_equals_the_oracle(run_ranks: Any) -> None:
    """Also where the weights are gathered again inside of two ranks (fully_shard needs even
    shards for this), and where a number is not finite in the row for another place.
    """
    cases = [
        Case(1, 4, UNITS, nodes_of=2),
        Case(2, 4, EVEN, "bf16", nodes_of=2, reshard=2),
        Case(3, 4, UNITS, nodes_of=2, nonfinite=(1, 0, 0)),
    ]
    assert run_ranks(compared, cases, world_size=4) == [[]] * 4


RANDOM = int(os.environ.get("SHARDS_CASES", "6"))
"""Random cases for each number of ranks. `make test-many` has 100."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_trainings_equal_the_oracle(run_ranks: Any, ranks: int) -> None:
    cases = [random_case(seed, ranks) for seed in range(RANDOM)]
    assert run_ranks(compared, cases, world_size=ranks) == [[]] * ranks
