"""Gradients and residuals equal those of a slow, plain implementation on simulated ranks
(`reference.py`): with torch, with the native kernel, and as on an accelerator, alone and in stacks.
"""

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.powersgd.exchange import draw
from commhooks.compressors.powersgd.reference import ReferenceMatrix, plain_mean
from tests.support.compilers import needs_compiler
from tests.support.inside import session_of
from tests.support.kernels import computing_with
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    Gradients,
    backward,
    bits_equal,
    masks,
    random_gradients,
    relative_error,
    wrap,
)
from tests.support.simulation import SimulatedPowerSGD

STEPS = 5
IDLE_AT = 3  # "first", which has the shape of "second", has no gradient on any rank
COMPRESSED = ("conv", "first", "second", "wide")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}
# Rank of the approximation, cap of the buckets, dtype.
CASES = [
    (1, EVERY_PARAMETER, torch.float64),
    (2, 25, torch.float32),
    (2, EVERY_PARAMETER, torch.float32),
    (3, 25, torch.float64),
    (5, EVERY_PARAMETER, torch.float64),
]


def _gradients(rank: int, step: int, dtype: torch.dtype) -> Gradients:
    gradients = random_gradients(SHAPES, rank, step, dtype)
    if step == IDLE_AT:
        gradients["first"].zero_()
    return gradients


def _run_all(kernel: str, masked: bool, batch: bool) -> list[dict[str, Any]]:
    results = []
    for approximation_rank, cap, dtype in CASES:
        options = {
            "matrix_approximation_rank": approximation_rank,
            "start_powerSGD_iter": 0,
            "random_seed": 11,
        }
        options |= {"min_compression_rate": 1.0, "batch_tensors_with_same_shape": batch}
        with masks(masked), computing_with(kernel):
            ddp = wrap(SHAPES, cap, dtype)
            hook = commhooks.attach(ddp, "powerSGD", hook_options=options)
            got = [backward(ddp, _gradients(dist.get_rank(), step, dtype)) for step in range(STEPS)]
            saved = hook.state_dict(residual="per_rank")["parameters"]
        residuals = {name: saved[name]["residual"][0] for name in COMPRESSED}
        results.append({"gradients": got, "residuals": residuals, "stats": hook.stats()})
    return results


@functools.cache
def _oracle(
    approximation_rank: int, dtype: torch.dtype, world_size: int
) -> tuple[list[Gradients], dict[str, Any]]:
    matrices = {}
    for name in COMPRESSED:
        m = torch.Size(SHAPES[name]).numel() // SHAPES[name][0]
        matrices[name] = ReferenceMatrix(
            draw(11, name, "Q", approximation_rank, m, dtype).T, world_size
        )
    expected: list[Gradients] = []
    for step in range(STEPS):
        ranks = [_gradients(rank, step, dtype) for rank in range(world_size)]
        expected.append({})
        for name, shape in SHAPES.items():
            of_ranks = [gradients[name] for gradients in ranks]
            matrix = matrices.get(name)
            wanted = (
                plain_mean(of_ranks)
                if matrix is None
                else matrix.step([g.flatten(1) for g in of_ranks])
            )
            expected[-1][name] = wanted.view(shape)
    return expected, {name: matrix.residuals for name, matrix in matrices.items()}


@pytest.mark.parametrize(
    ("kernel", "masked", "batch", "world_size"),
    [
        pytest.param("torch", False, False, 1, id="one rank"),
        pytest.param("torch", False, False, 2, id="torch"),
        pytest.param("native", False, False, 2, marks=needs_compiler, id="native"),
        pytest.param("torch", True, False, 2, id="masked"),
        pytest.param("torch", True, True, 2, id="masked, in stacks"),
    ],
)
def test_gradients_and_residuals_equal_the_oracle(
    run_ranks: Any, kernel: str, masked: bool, batch: bool, world_size: int
) -> None:
    results = run_ranks(_run_all, kernel, masked, batch, world_size=world_size)
    for index, (approximation_rank, cap, dtype) in enumerate(CASES):
        # On an accelerator the basis is made by other operations, which lose some digits.
        tolerance = 1e-10 if masked and dtype == torch.float64 else TOLERANCE[dtype]
        expected, residuals = _oracle(approximation_rank, dtype, world_size)
        for rank, result in enumerate(outcome[index] for outcome in results):
            for step, name in itertools.product(range(STEPS), SHAPES):
                got = result["gradients"][step][name]
                wanted = expected[step][name]
                if (step, name) == (IDLE_AT, "first"):
                    assert not got.any() and not wanted.any()
                else:
                    assert relative_error(got, wanted) < tolerance, (CASES[index], step, name)
            for name, residual in result["residuals"].items():
                assert relative_error(residual.flatten(1), residuals[name][rank]) < tolerance, (
                    CASES[index],
                    name,
                )
            stats = result["stats"]
            assert stats["kernel"] == kernel
            assert (
                stats["compressed_steps"] == STEPS
                and stats["bytes_sent"] < stats["bytes_uncompressed"]
            )
            # One all-reduce per bucket, and for the second factor one more where it holds a
            # compressed matrix.
            buckets, more = (1, 1) if cap == 25 else (len(SHAPES), len(COMPRESSED))
            assert stats["collectives_last_pass"] == buckets + more
        assert all(map(bits_equal, results[0][index]["gradients"], results[-1][index]["gradients"]))
    one_bucket, many_buckets = (results[0][index]["gradients"] for index in (1, 2))
    assert all(map(bits_equal, one_bucket, many_buckets))


# ---- the residual stays bounded ------------------------------------------------------------------

SIDE, RANK, WORLD_SIZE = 32, 2, 4
EARLY, LATE = 30, 400


def _noisy(generator: torch.Generator) -> list[torch.Tensor]:
    """A part that all ranks have and noise of each rank's own, of full rank both."""
    common = torch.randn(SIDE, SIDE, generator=generator)
    return [common + torch.randn(SIDE, SIDE, generator=generator) for _ in range(WORLD_SIZE)]


def _norm(residuals: list[torch.Tensor]) -> float:
    return float(torch.stack([r.flatten().double() for r in residuals]).norm())


def test_the_norm_of_the_residual_stays_where_torchs_grows() -> None:
    """torch's residual, `delta - P Q^T` with the averaged Q, grows like a random walk: what lies in
    the span of P is never taken out of the part in which a rank differs from the mean of the ranks.
    """
    generator = torch.Generator().manual_seed(0)
    ranks = SimulatedPowerSGD(WORLD_SIZE, SIDE, SIDE, RANK)
    torchs_form = ReferenceMatrix(ranks.start_q, WORLD_SIZE, torch_residual=True)
    ours, torchs = {}, {}
    for step in range(1, LATE + 1):
        gradients = _noisy(generator)
        ranks.step(gradients)
        torchs_form.step(gradients)
        if step in (EARLY, LATE):
            ours[step] = _norm([memory["residual"]["w"] for memory in ranks.states])
            assert torchs_form.residuals is not None
            torchs[step] = _norm(torchs_form.residuals)
    assert ours[LATE] <= 1.1 * ours[EARLY]
    assert torchs[LATE] >= 3 * torchs[EARLY]


# ---- directions of zeros -------------------------------------------------------------------------


def _recover_from_a_zero_direction(zero_rows: list[int], kernel: str) -> tuple[float, bool]:
    """Return how far a gradient of rank 2 is from recovery, and whether Q is whole again."""
    ddp = wrap({"second": SHAPES["second"]})
    config = commhooks.PowerSGD(
        matrix_approximation_rank=2,
        start_powerSGD_iter=0,
        min_compression_rate=1,
        use_error_feedback=False,
    )
    with computing_with(kernel):
        hook = commhooks.attach(ddp, config)
    backward(ddp, random_gradients({"second": SHAPES["second"]}, dist.get_rank(), 0))
    q = session_of(hook).state["q"]["second"]
    for row in zero_rows:
        q[row].zero_()
    generator = torch.Generator().manual_seed(0)
    n, m = SHAPES["second"]
    gradient = torch.randn(n, 2, generator=generator) @ torch.randn(2, m, generator=generator)
    error = relative_error(backward(ddp, {"second": gradient})["second"], gradient)
    return error, bool(q.any(dim=1).all())


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("zero_rows", [[1], [0, 1]])
def test_a_direction_of_zeros_in_q_is_refilled(
    run_ranks: Any, zero_rows: list[int], kernel: str
) -> None:
    """Otherwise P would get a random direction there instead of one of the gradient."""
    for error, restored in run_ranks(_recover_from_a_zero_direction, zero_rows, kernel):
        assert error < 1e-5
        assert restored
