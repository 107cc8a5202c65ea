"""`save_state` and `load_state` where users bring hooks, states and objects of their own, or where there is no hook."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

import commhooks
from accelerate_commhooks import CommHookKwargs
from tests.support.accelerate_checkpoints import BOTH, assert_equal, outcome, truncate
from tests.support.accelerators import (
    WRONG,
    Training,
    Warnings,
    accelerate_launched,
    hook_files,
    launched,
    new_accelerator,
    power_sgd,
)


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@launched
def _own_hooks_and_objects(folder: str, early: bool) -> dict[str, Any]:
    """Users who save models themselves empty the lists that hooks get; and have objects of their own saved."""

    def prepare(handler: CommHookKwargs, count: int) -> tuple[Training, Counter]:
        accelerator = new_accelerator(handler)

        def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if accelerator.is_main_process:
                torch.save(weights[0], os.path.join(output_dir, "mine.pt"))
            weights.clear()

        def load(models: list[Any], input_dir: str) -> None:
            models.pop().load_state_dict(torch.load(os.path.join(input_dir, "mine.pt"), weights_only=True))

        def register() -> None:
            accelerator.register_save_state_pre_hook(save)
            accelerator.register_load_state_pre_hook(load)

        if early:
            register()
        run, counter = Training(handler, accelerator=accelerator), Counter(count)
        if not early:
            register()
        accelerator.register_for_checkpointing(counter)
        return run, counter

    run, _ = prepare(power_sgd(), 41)
    run.train(6).save(folder).train(3)
    resumed, counter = prepare(power_sgd(WRONG), 0)
    resumed.load(folder, 6).train(3)
    return {"run": outcome(run), "resumed": outcome(resumed), "count": counter.count}


@pytest.mark.parametrize("early", [True, False], ids=["registered before prepare", "after"])
def test_users_own_hooks_and_objects(run_ranks: Any, tmp_path: Path, early: bool) -> None:
    for result in run_ranks(_own_hooks_and_objects, str(tmp_path), early):
        assert_equal(result["run"], result["resumed"])
        assert result["count"] == 41
    names = {path.name for path in tmp_path.iterdir()}
    assert {"mine.pt", "custom_checkpoint_0.pkl"} <= names and "model.safetensors" not in names


def _one_process(folder: str, made_by_two: str) -> dict[str, Any]:
    """A plain script without a launcher: Accelerate does not wrap in DDP, and there is nothing to attach a hook to."""
    with accelerate_launched(none=True), Warnings() as texts:
        handler = power_sgd()
        run = Training(handler, accelerator=Accelerator(kwargs_handlers=[handler]))
        run.train(1).save(folder).load(made_by_two, 6).train(1)
        attached = handler.attached or handler.is_attached(run.model)
        return {"attached": attached, "files": hook_files(folder), "warnings": texts}


def test_one_process_has_no_hook_and_reads_no_files_of_one(run_ranks: Any, checkpoint: Path, tmp_path: Path) -> None:
    truncate(checkpoint / BOTH[0])
    (result,) = run_ranks(_one_process, str(tmp_path / "alone"), str(checkpoint), world_size=1, init=False)
    assert result == {"attached": False, "files": [], "warnings": []}


class OwnState(Counter):
    """Of a hook of the user's own."""

    def __init__(self, plain: bool = True) -> None:
        super().__init__(0)
        self.plain = plain

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({} if self.plain else {"object": Counter(0)})


def own_hook(state: OwnState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.count += 1 + dist.get_rank()
    return commhooks.allreduce_hook(None, bucket)


@launched
def _own_hook(folder: str, plain: bool = True, save: bool = True) -> dict[str, Any]:
    handler = CommHookKwargs(hook=own_hook, hook_state=OwnState(plain))
    run = Training(handler)
    with Warnings() as texts:
        if save:
            run.train(2).save(folder)
        saved = handler.hook_state.count
        resumed = OwnState()
        Training.resumed(folder, 2, CommHookKwargs(hook=own_hook, hook_state=resumed))
    return {"saved": saved, "resumed": resumed.count, "warnings": texts}


def test_the_state_of_a_hook_of_ones_own(run_ranks: Any, tmp_path: Path) -> None:
    results = run_ranks(_own_hook, str(tmp_path))
    assert [result["resumed"] for result in results] == [result["saved"] for result in results]
    assert results[0]["saved"] * 2 == results[1]["saved"] > 0
    assert hook_files(tmp_path) == BOTH
    elsewhere = run_ranks(_own_hook, str(tmp_path), save=False, world_size=3)
    assert [result["resumed"] for result in elsewhere] == [results[0]["saved"]] * 3
    assert "every rank gets the state of rank 0" in elsewhere[0]["warnings"][0]


def test_a_state_that_cannot_be_read_back_is_not_saved(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_own_hook, str(tmp_path), plain=False):
        assert result["resumed"] == 0
        assert "is not saved" in result["warnings"][0] and "weights_only=True" in result["warnings"][0]
