"""A training with Accelerate that saves, one that resumes, and what is compared; for the tests of `save_state`."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.accelerators import WRONG, Training, Warnings, hook_files, launched, power_sgd
from tests.support.training import residuals
from tests.support.workers import WorkerPool

BOTH = ["comm_hook.pt", "comm_hook_rank0.pt", "comm_hook_rank1.pt"]


def outcome(run: Training) -> dict[str, Any]:
    return {"weights": run.weights(), "residuals": residuals(run.hook), "stats": run.hook.stats()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert torch.equal(one["weights"], other["weights"])
    assert one["residuals"].keys() == other["residuals"].keys()
    assert all(torch.equal(one["residuals"][name], other["residuals"][name]) for name in one["residuals"])


@launched
def train_and_save(folder: str, save_at: int = 6, then: int = 3, **handler: Any) -> dict[str, Any]:
    """What an uninterrupted run does, and its residuals when it saved."""
    run = Training(power_sgd(**handler)).train(save_at).save(folder)
    saved = residuals(run.hook)
    return outcome(run.train(then)) | {"saved": saved}


@launched
def resume(folder: str, step: int = 6, then: int = 3, options: Any = WRONG, **handler: Any) -> dict[str, Any]:
    with Warnings() as texts:
        run = Training.resumed(folder, step, power_sgd(options, **handler))
        loaded = residuals(run.hook)
        run.train(then)
    return outcome(run) | {"loaded": loaded, "warnings": texts}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def save_by_two(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint of two ranks, and the weights three steps after a resume from it without any residual."""
    folder = tmp_path_factory.mktemp("saved")
    worker_pool.run(train_and_save, str(folder))
    assert hook_files(folder) == BOTH
    without = tmp_path_factory.mktemp("without") / "checkpoint"
    shutil.copytree(folder, without)
    for name in BOTH[1:]:
        (without / name).unlink()
    results = worker_pool.run(resume, str(without))
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    return folder, results[0]["weights"]
