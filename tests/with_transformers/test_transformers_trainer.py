"""`CommHookTrainer` on two real ranks: training, checkpoints and resuming."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.features import trainer_resumes_on_cpu

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from transformers import Trainer  # noqa: E402

from accelerate_commhooks.transformers import CommHookTrainer  # noqa: E402
from tests.support.accelerators import OPTIONS, Warnings, hook_files, launched  # noqa: E402
from tests.support.transformers_runs import (
    EPOCH,
    FILES,
    POWER_SGD,
    assert_equal,
    make_trainer,
    outcome,
)  # noqa: E402

# For a run that resumes, so that loading must do the work.
WRONG = {"hook": "powerSGD", "hook_options": OPTIONS | {"start_powerSGD_iter": 7}}


@launched
def _run(
    folder: Path, resume: Any = None, cls: Any = CommHookTrainer, seed: int = 3, **kwargs: Any
) -> dict[str, Any]:
    with Warnings() as texts:
        trainer = make_trainer(folder, cls, seed=seed, **kwargs)
        trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer) | {"warnings": texts}


def _resume(run_ranks: Any, checkpoint: Path, **kwargs: Any) -> list[dict[str, Any]]:
    """A run with other weights and another start of compression, which loads them."""
    return run_ranks(_run, checkpoint.parent / "resumed", resume=str(checkpoint), seed=99, **kwargs)


@trainer_resumes_on_cpu
def test_a_resume_is_bit_equal(run_ranks: Any, tmp_path: Path) -> None:
    through = run_ranks(_run, tmp_path)
    middle, end = tmp_path / "checkpoint-4", tmp_path / "checkpoint-8"
    for folder in (middle, end):
        assert hook_files(folder) == FILES  # and no temporary ones
        for name in FILES:
            torch.load(folder / name, weights_only=True)
    resumed = [_resume(run_ranks, middle, hook=WRONG)]
    shutil.rmtree(end)
    resumed.append(run_ranks(_run, tmp_path, resume=True, seed=99, hook=WRONG))
    for results in resumed:
        for run, again in zip(through, results, strict=True):
            assert_equal(run, again)
            assert torch.equal(again["weights"], through[0]["weights"])  # replicas
            assert again["warnings"] == []
            [at_start] = again["seen"]
            assert (at_start["step"], at_start["start"]) == (4, OPTIONS["start_powerSGD_iter"])
            assert any(residual.norm() > 0 for residual in at_start["residuals"].values())
            assert again["stats"]["step"] == EPOCH and again["stats"]["compressed_steps"] == 4
    for run in through:
        stats = run["stats"]
        assert stats["compressed_steps"] == EPOCH - OPTIONS["start_powerSGD_iter"]
        # several buckets
        assert stats["compression_rate"] > 1.5 and stats["collectives_last_pass"] >= 6


@trainer_resumes_on_cpu
def test_without_the_hooks_files_the_resumed_run_differs(run_ranks: Any, tmp_path: Path) -> None:
    """And what `save_total_limit` and `save_only_model` leave in the folder."""
    through = run_ranks(_run, tmp_path, save_steps=2, save_total_limit=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-8"]
    assert all(hook_files(folder) == FILES for folder in tmp_path.iterdir())
    for name in FILES:
        (tmp_path / "checkpoint-6" / name).unlink()
    resumed = _resume(run_ranks, tmp_path / "checkpoint-6", hook=POWER_SGD, save_only_model=True)
    assert not torch.equal(resumed[0]["weights"], through[0]["weights"])
    assert torch.equal(resumed[0]["weights"], resumed[1]["weights"])
    no_state, unused = resumed[0]["warnings"]  # it begins at step 0, and so too late for two steps
    assert (
        "holds no state of a communication hook (comm_hook.pt)" in no_state
        and "compressed nothing" in unused
    )
    assert [row["step"] for row in resumed[0]["seen"]] == [0]
    assert hook_files(tmp_path / "resumed" / "checkpoint-8") == []


def test_a_checkpoint_without_the_hook_is_noticed(run_ranks: Any, tmp_path: Path) -> None:
    """A user's own `save_model` may leave out what the mixin does."""
    first, second = run_ranks(_run, tmp_path, cls=OwnSave)
    assert [text.rpartition(":")[0] for text in first["warnings"]] == [
        f"commhooks: the checkpoint of step {step} does not hold the state of hook 'powerSGD'"
        for step in (4, 8)
    ]
    assert "OwnSave.save_model does not call super()" in first["warnings"][0]
    assert second["warnings"] == []


class OwnSave(CommHookTrainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        Trainer.save_model(self, output_dir, _internal_call)
