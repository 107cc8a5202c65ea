"""What makes the Trainer wrap a model anew, and that the hook follows it."""

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.features import trainer_resumes_on_cpu

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers.trainer_utils import HPSearchBackend  # noqa: E402
from transformers_trainer import make_model  # noqa: E402  # of examples/

import commhooks  # noqa: E402
from accelerate_commhooks.transformers import CommHookTrainer, CommHookTrainerMixin  # noqa: E402
from tests.support.accelerators import hook_files, launched  # noqa: E402
from tests.support.ddp_steps import log_lines  # noqa: E402
from tests.support.transformers_runs import (
    EPOCH,
    FILES,
    POWER_SGD,
    assert_equal,
    make_trainer,
    outcome,
)  # noqa: E402


@trainer_resumes_on_cpu
def test_a_second_train_is_fresh_unless_it_resumes(run_ranks: Any, tmp_path: Path) -> None:
    """And a fraction of the run is one of the steps that the Trainer works out each time."""
    for first, second, third in run_ranks(_train_three_times, tmp_path):
        assert second["stats"]["step"] == second["stats"]["backward_passes"] == 12
        assert second["stats"]["compressed_steps"] == 9
        fresh, fresh_too, loaded = third["seen"]
        assert (fresh["step"], fresh_too["step"], loaded["step"]) == (0, 0, 4)
        assert fresh["residuals"] == fresh_too["residuals"] == {} and loaded["residuals"] != {}
        # A quarter of 2 epochs, a quarter of 3; then the saved number wins.
        assert [row["start"] for row in third["seen"]] == [2, 3, 2]
        assert [row["hooks"] for row in third["seen"]] == [1, 1, 1]
        assert_equal(first, third)


@launched
def _train_three_times(folder: Path) -> list[dict[str, Any]]:
    hook = {
        "hook": "powerSGD",
        "hook_options": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0.25},
    }
    epochs = {"max_steps": -1, "num_train_epochs": 2, "samples": 4 * 2 * 4}  # of four steps
    trainer = make_trainer(folder / "first", hook=hook, **epochs)
    assert trainer.comm_hook is None
    trainer.train()
    results = [outcome(trainer)]
    with pytest.raises(commhooks.HookRunError, match=r"after close\(\) of this hook"):
        trainer.model_wrapped(**trainer.data_collator([trainer.train_dataset[0]])).loss.backward()
    trainer.evaluate(trainer.train_dataset)
    trainer.args.num_train_epochs = 3
    trainer.args.output_dir = str(folder / "second")
    trainer.train()
    results.append(outcome(trainer))
    trainer.args.num_train_epochs = 2
    trainer.train(resume_from_checkpoint=str(folder / "first" / "checkpoint-4"))
    return [*results, outcome(trainer)]


def test_a_run_that_fails_closes_its_hook(run_ranks: Any, tmp_path: Path) -> None:
    """A run after it begins afresh, and what is done with the model in between waits for nobody."""
    for loss, steps in run_ranks(_fails_and_trains_again, tmp_path):
        assert loss > 0 and steps == 4


@launched
def _fails_and_trains_again(folder: Path) -> tuple[float, int]:
    class Failing(CommHookTrainer):
        fails = True

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.fails and self.state.global_step == 2:
                raise KeyboardInterrupt
            return super().training_step(*args, **kwargs)

    trainer = make_trainer(folder, Failing, max_steps=4)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(commhooks.HookRunError, match=r"after close\(\) of this hook"):
        trainer.model_wrapped(**trainer.data_collator([trainer.train_dataset[0]])).loss.backward()
    loss = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    trainer.fails = False
    trainer.train()
    return loss, trainer.comm_hook.stats()["step"]


def test_hyperparameter_search_keeps_the_hook(run_ranks: Any, tmp_path: Path) -> None:
    for results in run_ranks(_two_trials, tmp_path):
        for result in results:
            assert result["stats"]["step"] == 4 and result["stats"]["compressed_steps"] == 1
        assert [row["step"] for row in results[1]["seen"]] == [0, 0]
        assert not torch.equal(results[0]["weights"], results[1]["weights"])
    for run in ("run-0", "run-1"):
        assert hook_files(tmp_path / run / "checkpoint-4") == FILES


@launched
def _two_trials(folder: Path) -> list[dict[str, Any]]:
    """What `hyperparameter_search` does with Optuna, which is not installed."""
    trainer = make_trainer(folder, max_steps=4)
    first_accelerator, first_model = trainer.accelerator, trainer.model
    start = {name: tensor.clone() for name, tensor in first_model.state_dict().items()}

    def model_init() -> torch.nn.Module:
        model = make_model(width=16)
        model.load_state_dict(start)
        return model

    trainer.model_init = model_init
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: trial.params
    results = []
    for number, learning_rate in enumerate((0.01, 0.02)):
        trial = mock.Mock(number=number, params={"learning_rate": learning_rate})
        trainer.model_wrapped = None
        before = trainer.accelerator
        with mock.patch("transformers.integrations.hp_params", lambda trial: trial.params):
            trainer.train(trial=trial)
        assert trainer.accelerator is not before
        assert trainer.model_wrapped.bucket_bytes_cap == int(0.005 * 2**20)
        results.append(outcome(trainer))
    assert first_accelerator is not trainer.accelerator
    return results


def test_auto_find_batch_size_starts_fresh_in_a_users_trainer(
    run_ranks: Any, tmp_path: Path
) -> None:
    for result in run_ranks(_auto_find_batch_size, tmp_path):
        assert result["attempts"] == [4, 3]
        assert [row["step"] for row in result["seen"]] == [0, 0]
        assert result["seen"][1]["residuals"] == {} and result["seen"][1]["hooks"] == 1
        assert result["stats"]["step"] == result["stats"]["backward_passes"] == EPOCH
        assert torch.equal(result["weights"], result["first"])
        assert result["lines"] == []  # about the first attempt, which ended before the hook began


class TheirTrainer(Trainer):
    """A user's Trainer with an argument of its own, which runs out of memory with large batches."""

    def __init__(self, *args: Any, fits: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fits = fits

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        if len(inputs["input_ids"]) > self.fits and self.state.global_step == 5:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, num_items_in_batch)


class TheirsWithAHook(CommHookTrainerMixin, TheirTrainer):
    pass


@launched
def _auto_find_batch_size(folder: Path) -> dict[str, Any]:
    attempts = []

    class Counting(TheirsWithAHook):
        def set_initial_training_values(self, *args: Any) -> Any:
            attempts.append(self._train_batch_size)
            return super().set_initial_training_values(*args)

    options = POWER_SGD["hook_options"] | {"start_powerSGD_iter": 6}
    hook = POWER_SGD | {"hook_options": options, "fits": 3}
    with log_lines("commhooks.hook.unused") as lines:
        trainer = make_trainer(folder, Counting, auto_find_batch_size=True, hook=hook)
        trainer.train()
    result = outcome(trainer) | {"attempts": attempts, "lines": lines}
    everywhere = [torch.empty_like(result["weights"]) for _ in range(2)]
    dist.all_gather(everywhere, result["weights"])
    return result | {"first": everywhere[0]}


def test_a_trainer_does_not_wait_for_the_garbage_collector(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = CommHookTrainer(make_model(width=16), args, hook="powerSGD")
    gone = [weakref.ref(thing) for thing in (trainer, trainer.model)]
    gc.disable()
    try:
        del trainer
        assert not any(reference() for reference in gone)
    finally:
        gc.enable()
