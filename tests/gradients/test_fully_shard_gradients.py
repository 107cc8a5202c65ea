"""Averaged gradients on shards are the mean, then those of the slow oracle of PowerSGD."""

from typing import Any

import pytest
import torch

from commhooks.compressors.powersgd.exchange import draw
from commhooks.compressors.powersgd.reference import ReferenceMatrix
from tests.support.models import worst_error
from tests.support.sharded import (
    NAMES,
    POWERSGD,
    attached,
    backward,
    mean_over_ranks,
    random_gradients,
    rows_of,
)

STEPS = 4
RANK = POWERSGD["matrix_approximation_rank"]


def _powersgd(replicas: int, shards: int) -> dict[str, Any]:
    model, hook = attached(replicas, shards, hook_options=POWERSGD)
    gradients = [backward(model, random_gradients(step)) for step in range(STEPS)]
    return {"gradients": gradients, "stats": hook.stats(), "plan": hook.plan().as_dict()}


def _expected(replicas: int, shards: int) -> list[dict[str, torch.Tensor]]:
    """Each shard of each matrix is a matrix of its own, on as many ranks as there are replicas."""
    matrices: dict[tuple[str, int], ReferenceMatrix] = {}
    expected = [mean_over_ranks(0, replicas * shards)]
    for step in range(1, STEPS):
        ranks = [random_gradients(step, rank) for rank in range(replicas * shards)]
        average = mean_over_ranks(step, replicas * shards)
        for name, shape in NAMES.items():
            m = torch.Size(shape).numel() // shape[0]
            for index in range(shards if len(shape) > 1 else 0):
                rows = rows_of(name, shards, index)
                n = average[name][rows].shape[0]
                if (n + m) * RANK >= n * m:
                    continue
                start = draw(3, name, "Q", RANK, m, torch.float64)
                matrix = matrices.setdefault((name, index), ReferenceMatrix(start.T, replicas))
                of_replicas = [
                    torch.stack([ranks[replica * shards + i][name][rows] for i in range(shards)])
                    .mean(0)
                    .flatten(1)
                    for replica in range(replicas)
                ]
                average[name][rows] = matrix.step(of_replicas).view(-1, *shape[1:])
        expected.append(average)
    assert {name for name, _ in matrices} == {"first.weight", "even.weight", "own"}
    return expected


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (1, 3)])
def test_powersgd_equals_the_oracle_on_every_shard(
    run_ranks: Any, replicas: int, shards: int
) -> None:
    expected = _expected(replicas, shards)
    for result in run_ranks(_powersgd, replicas, shards, world_size=replicas * shards):
        for got, wanted in zip(result["gradients"], expected, strict=True):
            assert worst_error(got, wanted) < 1e-11
        stats = result["stats"]
        assert stats["compressed_steps"] == STEPS - 1 and stats["nonfinite_steps"] == 0
        assert stats["step"] == STEPS and stats["backward_passes"] == STEPS
        assert (
            stats["bytes_sent_last_pass"]
            == result["plan"]["bytes_after"] + result["plan"]["flag_bytes"]
        )
        assert stats["bytes_sent_last_pass"] < 0.6 * stats["bytes_uncompressed"] / STEPS
