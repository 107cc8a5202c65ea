"""On an accelerator the host reads the outcome of a step only where it must. The same code runs
here on CPU tensors.
"""

from typing import Any
from unittest import mock

import torch

from commhooks.gradients import precision
from tests.support.inside import session_of
from tests.support.models import masks
from tests.support.training import Run

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def _unread(run: Run) -> int:
    """The passes whose outcome the host has not read."""
    least, most = session_of(run.hook).held.steps(0, exact=False)
    return most - least


def _rewind_with_open_verdicts() -> dict[str, Any]:
    with mock.patch.object(precision, "is_host_readable", lambda device: False):
        run = Run.new(hook_options=OPTIONS).train(4)
        saved = run.save()
        run.train(3)
        return {"unsettled": _unread(run), "step": run.load(saved).train(2).hook.stats()["step"]}


def test_steps_that_nobody_asked_about_do_not_count_after_a_load(run_ranks: Any) -> None:
    for result in run_ranks(_rewind_with_open_verdicts):
        assert result["unsettled"] == 3
        assert result["step"] == 4 + 2


def _warm_up() -> list[int]:
    """How many verdicts are still with the device after each step."""
    with mock.patch.object(precision, "is_host_readable", lambda device: False):
        run = Run.new(hook_options={**OPTIONS, "start_powerSGD_iter": 4})
        return [_unread(run.train(1)) for _ in range(7)]


def test_the_host_asks_once_when_compression_may_begin(run_ranks: Any) -> None:
    assert run_ranks(_warm_up) == [[1, 2, 3, 4, 1, 2, 3]] * 2


def _first_step_bad(masked: bool) -> tuple[torch.Tensor, int]:
    """The first compressed step overflows, as a GradScaler's first steps do."""
    with masks(masked):
        run = Run.new(hook_options=OPTIONS | {"start_powerSGD_iter": 0})
        handle = run.ddp.module[3].weight.register_hook(lambda gradient: gradient * float("inf"))
        weights = run.weights()
        run.train(1)
        handle.remove()
        torch.nn.utils.vector_to_parameters(weights, run.ddp.parameters())
        run.optimizer.state.clear()
        run.train(1)
        return run.gradients[-1], run.hook.stats()["nonfinite_steps"]


def test_a_bad_first_step_leaves_nothing_behind_a_mask(run_ranks: Any) -> None:
    host = run_ranks(_first_step_bad, False)[0]
    masked = run_ranks(_first_step_bad, True)[0]
    assert host[1] == masked[1] == 1
    assert (host[0] - masked[0]).norm() < 1e-4 * host[0].norm()
