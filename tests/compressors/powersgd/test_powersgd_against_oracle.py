"""Gradients and residuals equal those of a slow, plain implementation on simulated ranks (`reference.py`)."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.reference import OracleMatrix, plain_mean
from tests.support.models import EVERY_PARAMETER, SHAPES, Gradients, backward, random_gradients, relative_error, wrap

STEPS = 8
COMPRESSED = ("conv", "first", "second", "wide")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}


def _run(cases: list[tuple[int, float, torch.dtype]]) -> list[dict[str, Any]]:
    """Gradients per step, and residuals at the end, of each case (rank of the approximation, cap, dtype)."""
    return [_run_one(*case) for case in cases]


def _run_one(approximation_rank: int, bucket_cap_mb: float, dtype: torch.dtype) -> dict[str, Any]:
    ddp = wrap(SHAPES, bucket_cap_mb, dtype)
    options = {
        "matrix_approximation_rank": approximation_rank,
        "start_powerSGD_iter": 0,
        "min_compression_rate": 1.0,
        "random_seed": 11,
        "fused": False,  # the native kernel has its turn in test_variants.py
    }
    hook = commhooks.attach(ddp, "powerSGD", hook_options=options)
    gradients = [backward(ddp, random_gradients(SHAPES, dist.get_rank(), step, dtype)) for step in range(STEPS)]
    saved = hook.state_dict(residual="per_rank")["parameters"]
    residuals = {name: saved[name]["residual"][0] for name in COMPRESSED}
    return {"gradients": gradients, "residuals": residuals, "stats": hook.stats()}


def _oracle(approximation_rank: int, dtype: torch.dtype, world_size: int) -> tuple[list[Gradients], dict[str, Any]]:
    matrices = {}
    for name in COMPRESSED:
        n = SHAPES[name][0]
        m = torch.Size(SHAPES[name]).numel() // n
        start = codec.draw(11, name, "Q", approximation_rank, m, dtype)
        matrices[name] = OracleMatrix(start.T, world_size)
    expected = []
    for step in range(STEPS):
        ranks = [random_gradients(SHAPES, rank, step, dtype) for rank in range(world_size)]
        expected.append({})
        for name, shape in SHAPES.items():
            each = [gradients[name] for gradients in ranks]
            if name in matrices:
                expected[-1][name] = matrices[name].step([g.flatten(1) for g in each]).view(shape)
            else:
                expected[-1][name] = plain_mean(each)
    return expected, {name: matrix.residuals for name, matrix in matrices.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_and_residuals_equal_the_oracle(run_ranks, world_size):
    cases = list(itertools.product([1, 2, 3], [25, EVERY_PARAMETER], [torch.float32, torch.float64]))
    results = run_ranks(_run, cases, world_size=world_size)
    for index, (approximation_rank, cap, dtype) in enumerate(cases):
        expected, residuals = _oracle(approximation_rank, dtype, world_size)
        for rank, result in enumerate(each[index] for each in results):
            for step, name in itertools.product(range(STEPS), SHAPES):
                got = result["gradients"][step][name]
                assert relative_error(got, expected[step][name]) < TOLERANCE[dtype], (step, name)
            for name, residual in result["residuals"].items():
                assert relative_error(residual.flatten(1), residuals[name][rank]) < TOLERANCE[dtype], name
            stats = result["stats"]
            assert stats["compressed_steps"] == STEPS
            assert stats["bytes_sent"] < stats["bytes_uncompressed"]
            # One all-reduce more per bucket that holds a compressed matrix.
            assert stats["collectives_last_pass"] == (2 if cap == 25 else len(SHAPES) + len(COMPRESSED))
