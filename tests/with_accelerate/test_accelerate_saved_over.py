"""`save_state` into a folder of an earlier run that had a hook, by one that has none, or other models: what the old
hook remembered belongs to weights that are gone, and nobody loads it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerate_checkpoints import BOTH
from tests.support.accelerators import (
    Training,
    Warnings,
    accelerate_launched,
    hook_files,
    launched,
    power_sgd,
    sharding_accelerator,
)
from tests.support.training import make_model

NOT_OURS = ["comm_hook_notes.pt", "my_comm_hook.pt"]


def _two_models() -> Training:
    run = Training()
    run.second = run.accelerator.prepare(make_model())
    return run


def _sharded(hook: str | None) -> Training:
    handler = CommHookKwargs(hook=hook)
    return Training(handler, accelerator=sharding_accelerator(handler, replicas=1))


def _attached_later() -> Training:
    accelerator = Accelerator()
    return Training(CommHookKwargs(hook=None).attach(accelerator), accelerator=accelerator)


RUNS = {
    "two models": _two_models,
    "one model": Training,
    "none": lambda: Training(CommHookKwargs(hook=None)),
    "none, attached later": _attached_later,
    "sharded": lambda: _sharded("int8"),
    "sharded, none": lambda: _sharded(None),
}


@launched
def _saved(folder: str, name: str) -> list[str]:
    RUNS[name]().train(4).save(folder)
    there = [name for name in hook_files(folder) if name not in NOT_OURS]
    return [name for name in there if (Path(folder) / name / ".metadata").is_file() or name.endswith(".pt")]


@pytest.mark.parametrize(
    ("before", "over", "left"),
    [
        ("two models", "none", []),
        ("one model", "none, attached later", []),
        ("two models", "one model", BOTH),
        ("one model", "sharded", ["comm_hook"]),
        ("sharded", "one model", BOTH),
        ("sharded", "sharded, none", []),
    ],
)
def test_nothing_of_an_old_hook_stays(run_ranks: Any, tmp_path: Path, before: str, over: str, left: list[str]) -> None:
    assert all(run_ranks(_saved, str(tmp_path), before))
    for name in NOT_OURS:
        (tmp_path / name).touch()
    assert run_ranks(_saved, str(tmp_path), over) == [left, left]
    assert all((tmp_path / name).is_file() for name in NOT_OURS)


def _alone(folder: str) -> None:
    """As a plain script, without a launcher."""
    with accelerate_launched(none=True):
        handler = power_sgd()
        run = Training(handler, accelerator=Accelerator(kwargs_handlers=[handler]))
        run.load(folder, 4).train(2).save(folder)


@launched
def _resumed(folder: str) -> tuple[int, list[str], torch.Tensor]:
    with Warnings() as texts:
        run = Training.resumed(folder, 6)
    return run.hook.stats()["step"], texts, run.weights()


def test_two_ranks_one_and_two_again(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_saved, str(tmp_path), "one model")
    run_ranks(_alone, str(tmp_path), world_size=1, init=False)
    (step, [warning], weights), (_, none, others) = run_ranks(_resumed, str(tmp_path))
    assert step == 0 and torch.equal(weights, others) and none == []
    assert "holds no state of a communication hook (comm_hook.pt)" in warning


def test_an_accelerator_is_pickled_as_without_a_hook() -> None:
    with accelerate_launched(none=True):
        other = pickle.loads(pickle.dumps(Accelerator(cpu=True, kwargs_handlers=[power_sgd()])))
        assert other.save_state.__self__ is other and other.save_state.__func__ is Accelerator.save_state
