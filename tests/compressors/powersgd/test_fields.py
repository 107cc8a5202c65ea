"""Saved factors: those of another matrix are named, those of another rank fitted."""

from dataclasses import replace

import pytest
import torch

from commhooks.compressors.powersgd.batched import BatchedPowerSGDCompressor
from commhooks.compressors.powersgd.compressor import MatrixPlan, PowerSGDCompressor
from commhooks.compressors.state_field import StateField

Q, BUCKET_Q = PowerSGDCompressor.q, BatchedPowerSGDCompressor.q
PLAN = MatrixPlan("w", (6, 4), 24, torch.float32, compressed=True, n=6, m=4, rank=2)
UNCOMPRESSED = replace(PLAN, compressed=False, rank=0)


@pytest.mark.parametrize(
    ("field", "columns", "problem"),
    [
        (Q, 4, None),
        (Q, 6, "a Q with 6 rows for w, which needs 4"),
        (BUCKET_Q, 5, None),  # DDP has yet to build the bucket
    ],
)
def test_a_factor_of_another_matrix_is_named(
    field: StateField, columns: int, problem: str | None
) -> None:
    value = torch.zeros(3, columns)  # of another rank, which can be fitted
    assert field.problem(value, PLAN) == problem
    assert field.problem(value, UNCOMPRESSED) is None, "it is not used then"


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_a_factor_of_another_rank_keeps_its_rows(rank: int) -> None:
    value = torch.ones(3, 4)
    fresh = torch.full((rank, 4), 2.0)
    plan = replace(PLAN, rank=rank)
    refitted, zeros = Q.refit(value, plan, fresh), Q.refit(value, plan, None)
    assert refitted is not None and zeros is not None
    assert refitted[:, 0].tolist() == [1.0, 1.0, 1.0, 2.0, 2.0][:rank]
    assert zeros[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0][:rank]
    assert Q.refit(value, UNCOMPRESSED, fresh) is None
