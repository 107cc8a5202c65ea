"""Local steps in a `CommHookTrainer` resume, evaluate the common weights, and end the round."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.features import trainer_resumes_on_cpu

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from safetensors.torch import load_file  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from tests.support.accelerators import launched  # noqa: E402
from tests.support.training import flat  # noqa: E402
from tests.support.transformers_runs import assert_equal, make_trainer, outcome  # noqa: E402

HOOK = {"hook": "diloco", "hook_options": {"sync_every": 3, "outer_momentum": 0.3}}


@launched
def _run(folder: Path, resume: Any = None, seed: int = 3) -> dict[str, Any]:
    trainer = make_trainer(folder, seed=seed, hook=HOOK)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


@trainer_resumes_on_cpu
def test_a_resume_in_mid_round_is_bit_equal(run_ranks: Any, tmp_path: Path) -> None:
    through = run_ranks(_run, tmp_path)
    resumed = run_ranks(_run, tmp_path / "resumed", resume=str(tmp_path / "checkpoint-4"), seed=99)
    for run, again in zip(through, resumed, strict=True):
        assert_equal(run, again)
        # the training ends with a round
        assert torch.equal(again["weights"], through[0]["weights"])


class _Looks(TrainerCallback):
    """Saves the model at step 4, evaluates after step 5, both in mid-round; saves at step 8."""

    trainer: Any

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, torch.Tensor]] = {}

    def look(self, name: str) -> None:
        self.seen[name] = {
            key: tensor.clone() for key, tensor in self.trainer.model.state_dict().items()
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.look("before")
            self.trainer.save_model(f"{args.output_dir}/by_hand")
            self.look("by_hand")
        control.should_evaluate = state.global_step == 5

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.look("checkpoint-8")


@launched
def _looked_at(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    trainer = make_trainer(folder, hook=HOOK, save_only_model=True, save_steps=8)
    looks = _Looks()
    looks.trainer = trainer
    trainer.eval_dataset = trainer.train_dataset
    trainer.add_callback(looks)
    loop = trainer.evaluation_loop

    def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
        looks.look("evaluated")
        return loop(*args, **kwargs)

    trainer.evaluation_loop = evaluation_loop
    trainer.train()
    assert trainer.comm_hook.stats()["outer_gradient_norm"] > 0
    return looks.seen


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_whoever_looks_at_the_model_sees_the_common_one(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_looked_at, tmp_path)
    assert not _same(first.pop("before"), second.pop("before"))
    assert first.keys() == {"by_hand", "evaluated", "checkpoint-8"}
    assert all(_same(first[name], second[name]) for name in first)
    for name in ("by_hand", "checkpoint-8"):
        assert _same(load_file(tmp_path / name / "model.safetensors"), first[name])


class _StopsInMidRound(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 5


@launched
def _load_best(folder: Path) -> dict[str, Any]:
    settings = {"save_only_model": True, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(
        folder, hook=HOOK, load_best_model_at_end=True, metric_for_best_model="loss", **settings
    )
    trainer.add_callback(_StopsInMidRound())
    trainer.train()
    at_end = flat(trainer.model.parameters())
    trainer.evaluate()
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    return {
        "end": at_end,
        "after": flat(trainer.model.parameters()),
        "best": best,
        "now": trainer.model.state_dict(),
    }


def test_the_best_model_stays_as_it_was_saved(run_ranks: Any, tmp_path: Path) -> None:
    """Nothing of the round in which the training was stopped comes into it."""
    for rank in run_ranks(_load_best, tmp_path):
        assert torch.equal(rank["end"], rank["after"])
        assert all(torch.equal(rank["best"][name], rank["now"][name]) for name in rank["best"])
