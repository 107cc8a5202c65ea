"""A parameter whose gradient is zero on every rank for a while keeps its memory, and trains again afterwards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.powersgd.exchange import draw
from commhooks.compressors.powersgd.reference import OracleMatrix
from tests.support.inside import session_of
from tests.support.kernels import computing_with
from tests.support.models import (
    EVERY_PARAMETER,
    SHAPES,
    Gradients,
    backward,
    bits_equal,
    random_gradients,
    relative_error,
    wrap,
)

LAYER = "second"
QUIET = range(3, 6)
STEPS = 10


def _gradients(rank: int, step: int, quiet: range, on_rank: int | None = None) -> Gradients:
    gradients = random_gradients(SHAPES, rank, step)
    if step in quiet and on_rank in (None, rank):
        gradients[LAYER].zero_()
    return gradients


def _memory(hook: commhooks.CommHook) -> Gradients:
    entry = hook.state_dict(residual="per_rank")["parameters"][LAYER]
    if entry["q"] is None:
        return {}
    return {"Q": entry["q"], "residual": entry["residual"][0]}


def _run(quiet: range, wrapper: str | None, cap: float, on_rank: int | None = None) -> dict[str, Any]:
    ddp = wrap(SHAPES, cap)
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0, "min_compression_rate": 1}
    with computing_with("torch" if cap == EVERY_PARAMETER else "native"):
        hook = commhooks.attach(ddp, "powerSGD", hook_options=options, wrapper=wrapper)
    gradients, memory = [], [_memory(hook)]
    for step in range(STEPS):
        gradients.append(backward(ddp, _gradients(dist.get_rank(), step, quiet, on_rank)))
        memory.append(_memory(hook))
    return {"gradients": gradients, "memory": memory, "stats": hook.stats()}


def _oracle(quiet: range, on_rank: int | None = None) -> list[torch.Tensor]:
    start = draw(0, LAYER, "Q", 2, SHAPES[LAYER][1], torch.float32)
    matrix = OracleMatrix(start.T, 2)
    return [matrix.step([_gradients(rank, step, quiet, on_rank)[LAYER] for rank in range(2)]) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("quiet", "cap", "wrapper"),
    [(QUIET, 25, None), (QUIET, EVERY_PARAMETER, "fp16"), (range(3), 25, "bf16"), (range(3), EVERY_PARAMETER, None)],
)
def test_memory_waits_and_the_layer_trains_again(run_ranks, quiet, cap, wrapper):
    ranks = run_ranks(_run, quiet, wrapper, cap)
    expected = _oracle(quiet)
    for each in ranks:
        assert each["stats"]["compressed_steps"] == STEPS
        for step, (gradients, before, after) in enumerate(
            zip(each["gradients"], each["memory"][:-1], each["memory"][1:], strict=True)
        ):
            if step in quiet:
                assert not gradients[LAYER].any()
                assert bits_equal(before, after)
            else:
                tolerance = {None: 1e-4, "fp16": 2e-2, "bf16": 1e-1}[wrapper]
                assert relative_error(gradients[LAYER], expected[step]) < tolerance, step
    assert all(map(bits_equal, ranks[0]["gradients"], ranks[1]["gradients"]))


def test_zero_on_one_rank_only_is_a_gradient_like_any_other(run_ranks):
    expected = _oracle(QUIET, on_rank=1)
    for each in run_ranks(_run, QUIET, None, 25, on_rank=1):
        for gradients, matrix in zip(each["gradients"], expected, strict=True):
            assert matrix.any()
            assert relative_error(gradients[LAYER], matrix) < 1e-4


def _recover_from_a_zero_direction(zero_rows: list[int], kernel: str) -> tuple[float, bool]:
    """(how far a gradient of rank 2 is from being recovered at once, whether Q has its directions back)."""
    ddp = wrap({LAYER: SHAPES[LAYER]})
    config = commhooks.PowerSGD(
        matrix_approximation_rank=2,
        start_powerSGD_iter=0,
        min_compression_rate=1,
        use_error_feedback=False,
    )
    with computing_with(kernel):
        hook = commhooks.attach(ddp, config)
    backward(ddp, random_gradients({LAYER: SHAPES[LAYER]}, dist.get_rank(), 0))
    assert session_of(hook) is not None
    q = session_of(hook).state["q"][LAYER]
    for row in zero_rows:
        q[row].zero_()
    generator = torch.Generator().manual_seed(0)
    n, m = SHAPES[LAYER]
    gradient = torch.randn(n, 2, generator=generator) @ torch.randn(2, m, generator=generator)
    error = relative_error(backward(ddp, {LAYER: gradient})[LAYER], gradient)
    return error, bool(q.any(dim=1).all())


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("zero_rows", [[1], [0, 1]])
def test_a_direction_of_zeros_in_q_is_refilled(run_ranks, zero_rows, kernel):
    """Otherwise P would get a random direction there instead of one of the gradient."""
    for error, restored in run_ranks(_recover_from_a_zero_direction, zero_rows, kernel):
        assert error < 1e-5
        assert restored
