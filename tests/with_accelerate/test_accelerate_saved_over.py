"""`save_state` into a folder of an earlier run that had a hook, by one that has none, or other models: what the old
hook remembered belongs to weights that are gone, and nobody loads it."""

from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerate_checkpoints import BOTH
from tests.support.accelerators import (
    Training,
    hook_files,
    launched,
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
