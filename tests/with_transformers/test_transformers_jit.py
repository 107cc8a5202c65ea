"""The Trainer saves on SIGTERM that comes to two real ranks in the middle of a step."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.features import trainer_resumes_on_cpu

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_jit_checkpoint import JITCheckpointCallback  # noqa: E402

from tests.support.accelerators import hook_files, launched  # noqa: E402
from tests.support.transformers_runs import EPOCH, FILES, assert_equal, make_trainer, outcome  # noqa: E402


class Preempted(TrainerCallback):
    """As if SIGTERM's grace period ended in the forward pass of a step, on every rank."""

    def __init__(self, trainer: Any, step: int) -> None:
        self.step = step
        callbacks = trainer.callback_handler.callbacks
        [self.manager] = [
            callback.jit_manager
            for callback in callbacks
            if isinstance(callback, JITCheckpointCallback)
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.manager.is_checkpoint_requested = True


@launched
def _run(
    folder: Path, preempted_in: int | None = None, resume: str | None = None, seed: int = 3
) -> dict[str, Any]:
    trainer = make_trainer(folder, seed=seed, save_strategy="no", enable_jit_checkpoint=True)
    if preempted_in is not None:
        trainer.add_callback(Preempted(trainer, preempted_in))
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


@trainer_resumes_on_cpu
def test_a_run_that_was_preempted_in_a_step_resumes_bit_equal(
    run_ranks: Any, tmp_path: Path
) -> None:
    through = run_ranks(_run, tmp_path / "through")
    stopped = run_ranks(_run, tmp_path, preempted_in=4)
    assert [run["stats"]["step"] for run in stopped] == [5, 5]
    saved = tmp_path / "checkpoint-5"
    assert hook_files(saved) == FILES and not list(saved.glob("*incomplete*"))
    resumed = run_ranks(_run, tmp_path / "resumed", resume=str(saved), seed=99)
    for run, again in zip(through, resumed, strict=True):
        run["losses"].pop(4)  # the Trainer logs a step after it has saved
        assert_equal(run, again)
        [at_start] = again["seen"]
        assert at_start["step"] == 5 and again["stats"]["step"] == EPOCH
        assert any(residual.norm() > 0 for residual in at_start["residuals"].values())
