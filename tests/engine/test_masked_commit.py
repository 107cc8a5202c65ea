"""On an accelerator decisions are masks, so that the host never waits. The same code runs here on CPU tensors."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from commhooks.gradients import precision
from tests.support.inside import session_of
from tests.support.training import Run, residuals

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}


def _train(masked: bool) -> dict[str, Any]:
    with mock.patch.object(precision, "is_host_readable", lambda device: not masked):
        run = Run.new(hook_options=OPTIONS).train(5)
        # One step with an inf on rank 1, skipped as a GradScaler would.
        weights = run.weights()
        if dist.get_rank() == 1:
            handle = run.ddp.module[3].weight.register_hook(lambda gradient: gradient * float("inf"))
        run.train(1)
        nonfinite = not run.gradients.pop().isfinite().all()
        if dist.get_rank() == 1:
            handle.remove()
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(weights, run.ddp.parameters())
        run.optimizer.state.clear()
        # One step in which the last layer has no gradient on any rank.
        before = residuals(run.hook)
        handle = run.ddp.module[7].weight.register_hook(torch.zeros_like)
        run.train(1)
        handle.remove()
        idle = torch.equal(residuals(run.hook)["7.weight"], before["7.weight"])
        moved = not torch.equal(residuals(run.hook)["5.weight"], before["5.weight"])
        run.train(3)
        return {
            "weights": run.weights(),
            "nonfinite": nonfinite,
            "idle": idle,
            "moved": moved,
            "stats": run.hook.stats(),
            "saved": run.save()["hook"]["step"],
        }


def test_masks_decide_as_the_host_does(run_ranks: Any) -> None:
    host, masked = run_ranks(_train, False), run_ranks(_train, True)
    for result in (*host, *masked):
        assert result["nonfinite"] and result["idle"] and result["moved"]
        assert result["stats"]["nonfinite_steps"] == 1
        assert result["stats"]["step"] == result["saved"] == 9
        assert result["stats"]["compressed_steps"] == 7
    assert torch.equal(masked[0]["weights"], masked[1]["weights"])
    # Not bit for bit: where nobody may ask whether a direction is missing, every basis is orthonormalised twice.
    assert (masked[0]["weights"] - host[0]["weights"]).abs().max() < 1e-5


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
