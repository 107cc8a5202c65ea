"""`fused` (a native kernel) may change with a resume."""

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
        pytest.param({"fused": True}, {"fused": False}, marks=needs_compiler),
    ],
    ids=str,
)
def test_the_option_may_change_with_a_resume(run_ranks: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    (weights, compressed), other = run_ranks(_change, before, after)
    assert torch.equal(weights, other[0]) and weights.isfinite().all()
    assert compressed == other[1] == 4
