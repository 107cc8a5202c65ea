"""Hooks that average weights once in several steps, in a `CommHookTrainer`: resume, evaluation, the end."""

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
        assert torch.equal(again["weights"], through[0]["weights"])  # the training ends with a round


class _Evaluates(TrainerCallback):
    """In mid-round and at the end of the third one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = state.global_step in (4, 7)


@launched
def _evaluate(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    trainer = make_trainer(folder, hook=HOOK, save_strategy="no")
    trainer.add_callback(_Evaluates())
    trainer.eval_dataset = trainer.train_dataset
    seen: list[torch.Tensor] = []
    loop = trainer.evaluation_loop

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        seen.append(flat(trainer.model.parameters()))
        return loop(*args, **kwargs)

    trainer.evaluation_loop = looked_at
    trainer.train()
    return seen[0], seen[1]


def test_an_evaluation_sees_the_common_model(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_evaluate, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


class _StopsInMidRound(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 5


@launched
def _load_best(folder: Path) -> dict[str, Any]:
    settings = {"save_only_model": True, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(folder, hook=HOOK, load_best_model_at_end=True, metric_for_best_model="loss", **settings)
    trainer.add_callback(_StopsInMidRound())
    trainer.train()
    at_end = flat(trainer.model.parameters())
    trainer.evaluate()
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    return {"end": at_end, "after": flat(trainer.model.parameters()), "best": best, "now": trainer.model.state_dict()}


def test_the_best_model_stays_as_it_was_saved(run_ranks: Any, tmp_path: Path) -> None:
    """Nothing of the round in which the training was stopped comes into it."""
    for rank in run_ranks(_load_best, tmp_path):
        assert torch.equal(rank["end"], rank["after"])
        assert all(torch.equal(rank["best"][name], rank["now"][name]) for name in rank["best"])


class _LooksAtSaves(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append({name: each.clone() for name, each in model.state_dict().items()})


@launched
def _save_models(folder: Path) -> dict[str, torch.Tensor]:
    trainer, looks = make_trainer(folder, hook=HOOK, save_only_model=True), _LooksAtSaves()
    trainer.add_callback(looks)
    trainer.train()
    return looks.seen[0]


def test_a_model_that_is_saved_alone_is_the_common_one(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_save_models, tmp_path)
    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")  # in mid-round
    for name, tensor in saved.items():
        assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor)


class _SavesInMidRound(TrainerCallback):
    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            self.trainer.save_model(f"{args.output_dir}/by_hand")
            self.weights = flat(self.trainer.model.parameters())


@launched
def _save_by_hand(folder: Path) -> Any:
    trainer, saves = make_trainer(folder, hook=HOOK, save_strategy="no"), _SavesInMidRound()
    saves.trainer = trainer
    trainer.add_callback(saves)
    trainer.train()
    return saves.weights, trainer.comm_hook.stats()["outer_gradient_norm"]


def test_a_callback_that_saves_ends_the_round(run_ranks: Any, tmp_path: Path) -> None:
    (first, norm), (second, _) = run_ranks(_save_by_hand, tmp_path)
    assert torch.equal(first, second) and norm > 0
