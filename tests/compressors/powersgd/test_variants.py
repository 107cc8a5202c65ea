"""`alternate` (one factor per step) and `fused` (a native kernel): bytes, and changes with a resume.

What every compressor promises is in `test_every_compressor.py`.
"""

from typing import Any

import pytest
import torch

from tests.support.compilers import needs_compiler
from tests.support.training import Run

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _change(before: dict[str, Any], after: dict[str, Any]) -> tuple[torch.Tensor, int]:
    saved = Run.new(hook_options={**OPTIONS, **before}).train(4).save(residual="per_rank")
    run = Run.new(hook_options={**OPTIONS, **after}).load(saved).train(4)
    return run.weights(), run.hook.stats()["compressed_steps"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"alternate": True}, {}),
        ({}, {"alternate": True}),
        ({"alternate": True}, {"alternate": True, "matrix_approximation_rank": 4}),
        ({"alternate": True}, {"alternate": True, "matrix_approximation_rank": 1}),
        pytest.param({"fused": True}, {"fused": False}, marks=needs_compiler),
    ],
    ids=str,
)
def test_the_option_may_change_with_a_resume(run_ranks: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    (weights, compressed), other = run_ranks(_change, before, after)
    assert torch.equal(weights, other[0]) and weights.isfinite().all()
    assert compressed == other[1] == 4


def _bytes(variant: dict[str, Any]) -> list[int]:
    run = Run.new(hook_options={**OPTIONS, "start_powerSGD_iter": 0, **variant})
    return [run.train(1).hook.stats()["bytes_sent_last_pass"] for _ in range(4)] + [run.hook.plan().bytes_after]


def test_half_the_bytes(run_ranks: Any) -> None:
    for usual, alternate in zip(run_ranks(_bytes, {}), run_ranks(_bytes, {"alternate": True}), strict=True):
        flags = 4 * 4
        matrices = [((12, 9), 2), ((24, 432), 2), ((24, 24), 2), ((10, 24), 2)]
        vectors = 4 * (12 + 24 + 24 + 10)
        p, q = (sum(4 * r * shape[side] for shape, r in matrices) for side in (0, 1))
        assert usual[:4] == [p + q + vectors + flags] * 4
        assert alternate[:4] == [p + vectors + flags, q + vectors + flags] * 2
        assert alternate[4] == (p + q) // 2 + vectors
