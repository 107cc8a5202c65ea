"""`accelerator.save_state` and `load_state` with a hook, on real ranks: the table in docs/accelerate.md."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from accelerators import (
    OPTIONS,
    WRONG,
    Training,
    Warnings,
    accelerate_launched,
    hook_files,
    launched,
    new_accelerator,
    power_sgd,
)
from training import batch, flat, make_model, residuals

import commhooks
from accelerate_commhooks import CommHookKwargs

BOTH = ["comm_hook.pt", "comm_hook_rank0.pt", "comm_hook_rank1.pt"]


def outcome(run: Training) -> dict[str, Any]:
    return {"weights": run.weights(), "residuals": residuals(run.hook), "stats": run.hook.stats()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert torch.equal(one["weights"], other["weights"])
    assert one["residuals"].keys() == other["residuals"].keys()
    assert all(torch.equal(one["residuals"][name], other["residuals"][name]) for name in one["residuals"])


@launched
def _train_and_save(folder: str, save_at: int = 6, then: int = 3, **handler: Any) -> dict[str, Any]:
    """What an uninterrupted run does, and its residuals when it saved."""
    run = Training(power_sgd(**handler)).train(save_at).save(folder)
    saved = residuals(run.hook)
    return outcome(run.train(then)) | {"saved": saved}


@launched
def _resume(folder: str, step: int = 6, then: int = 3, options: Any = WRONG, **handler: Any) -> dict[str, Any]:
    with Warnings() as texts:
        run = Training.resumed(folder, step, power_sgd(options, **handler))
        loaded = residuals(run.hook)
        run.train(then)
    return outcome(run) | {"loaded": loaded, "warnings": texts}


@launched
def _fails_to_load(folder: str, **handler: Any) -> dict[str, Any]:
    """The error on this rank, and whether anything has changed by then."""
    run = Training(power_sgd(WRONG | {"start_powerSGD_iter": 1}, **handler)).train(3)
    before = outcome(run)
    with pytest.raises(commhooks.PayloadError) as caught:
        run.load(folder, 6)
    assert_equal(outcome(run), before)
    assert outcome(run)["stats"]["step"] == 3
    return {"error": str(caught.value)}


# ---- the ordinary way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_at", [2, 3, 6])
@pytest.mark.parametrize("handler", [{}, {"save_residual": "mean"}, {"wrapper": "bf16"}])
def test_resume_is_bit_equal(run_ranks: Any, tmp_path: Path, save_at: int, handler: dict[str, Any]) -> None:
    through = run_ranks(_train_and_save, str(tmp_path), save_at, 9 - save_at, **handler)
    resumed = run_ranks(_resume, str(tmp_path), save_at, 9 - save_at, **handler)
    for run, again in zip(through, resumed, strict=True):
        assert_equal(run, again)
        assert torch.equal(again["weights"], resumed[0]["weights"])
        assert again["stats"]["step"] == 9
        assert again["stats"]["compressed_steps"] == 9 - max(save_at, 3)
        assert again["stats"]["collectives_last_pass"] >= 6  # several buckets
        assert again["warnings"] == []
    # Before the first compressed step there are no residuals, and in a mean there are none of a rank.
    parts = save_at > 3 and handler.get("save_residual") != "mean"
    assert hook_files(tmp_path) == (BOTH if parts else BOTH[:1])
    for name in hook_files(tmp_path):
        torch.load(tmp_path / name, weights_only=True)


def test_without_our_files_the_resumed_run_differs(run_ranks: Any, tmp_path: Path) -> None:
    """That a resume is bit-equal is the work of these files; and their absence is said once."""
    through = run_ranks(_train_and_save, str(tmp_path))
    for path in tmp_path.glob("comm_hook*"):
        path.unlink()
    resumed = run_ranks(_resume, str(tmp_path), options=OPTIONS)
    assert (resumed[0]["weights"] - through[0]["weights"]).abs().max() > 1e-4
    assert torch.equal(resumed[0]["weights"], resumed[1]["weights"])
    assert len(resumed[0]["warnings"]) == 1 and resumed[1]["warnings"] == []
    assert "holds no state of a communication hook (comm_hook.pt)" in resumed[0]["warnings"][0]


def test_drop_saves_no_residual(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_train_and_save, str(tmp_path))  # whose files of ranks go when the same folder is saved to
    run_ranks(_train_and_save, str(tmp_path), save_residual="drop")
    assert hook_files(tmp_path) == BOTH[:1]
    for result in run_ranks(_resume, str(tmp_path)):
        assert result["loaded"] == {}
        assert result["stats"]["step"] == 9
        assert result["warnings"] == []


def test_a_simple_hook_is_saved_too(run_ranks: Any, tmp_path: Path) -> None:
    for stats in run_ranks(_simple_hook, str(tmp_path)):
        assert stats["compression_rate"] == 2
    assert hook_files(tmp_path) == BOTH[:1]


@launched
def _simple_hook(folder: str) -> dict[str, Any]:
    Training(CommHookKwargs(hook="fp16_compress")).train(2).save(folder)
    return Training.resumed(folder, 2, CommHookKwargs(hook="fp16_compress")).train(1).hook.stats()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("save_residual", ["per_rank", "mean"])
def test_another_world_size(run_ranks: Any, tmp_path: Path, before: int, after: int, save_residual: str) -> None:
    saved = run_ranks(_train_and_save, str(tmp_path), world_size=before, save_residual=save_residual)
    resumed = run_ranks(_resume, str(tmp_path), world_size=after, save_residual=save_residual)
    for result in resumed:
        assert torch.equal(result["weights"], resumed[0]["weights"])
        assert result["stats"]["step"] == 9 and result["stats"]["compressed_steps"] == 3
        assert result["warnings"] == []
        assert result["loaded"].keys() == saved[0]["saved"].keys()
    for name in saved[0]["saved"]:
        mean_before = torch.stack([each["saved"][name] for each in saved]).double().mean(0)
        assert mean_before.norm() > 0
        for result in resumed:
            assert (mean_before - result["loaded"][name]).norm() <= 1e-6 * mean_before.norm()


def test_another_rank_of_the_approximation(run_ranks: Any, tmp_path: Path) -> None:
    through = run_ranks(_train_and_save, str(tmp_path))
    resumed = run_ranks(_resume, str(tmp_path), options=WRONG | {"matrix_approximation_rank": 4})
    for run, again in zip(through, resumed, strict=True):
        assert set(again["loaded"]) == {"3.weight", "5.weight"}  # at rank 4 the others are not worth compressing
        assert all(torch.equal(run["saved"][name], again["loaded"][name]) for name in again["loaded"])
        assert again["stats"]["compressed_steps"] == 3
        assert torch.equal(again["weights"], resumed[0]["weights"])


@launched
def _scaled(folder: str) -> dict[str, Any]:
    run = Training(scale=64.0).train(6).save(folder).train(3)
    resumed = Training.resumed(folder, 6, scale=2.0)
    # The scale has grown at the end of the step whose residual was saved.
    assert resumed.accelerator.scaler.get_scale() == resumed.hook._low_rank._memory.loss_scale * 2 == 256
    return {"run": outcome(run), "resumed": outcome(resumed.train(3))}


def test_the_loss_scale_is_saved_with_the_residual(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_scaled, str(tmp_path)):
        assert_equal(result["run"], result["resumed"])


# ---- what can be wrong with the files --------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _rewrite(path: Path, **changes: Any) -> None:
    torch.save(torch.load(path, weights_only=True) | changes, path)


DAMAGE_OF_ONE_RANK = {
    "missing": (lambda folder: (folder / BOTH[2]).unlink(), "is missing"),
    "truncated": (lambda folder: _truncate(folder / BOTH[2]), "cannot be read"),
    "empty": (lambda folder: (folder / BOTH[2]).write_bytes(b""), "cannot be read"),
    "of another save": (lambda folder: _rewrite(folder / BOTH[2], fingerprint="0"), "is of another save"),
    "of another rank": (lambda folder: shutil.copy(folder / BOTH[1], folder / BOTH[2]), "is of rank 0, not of rank 1"),
    "of another kind": (lambda folder: shutil.copy(folder / BOTH[0], folder / BOTH[2]), "is not the part of one rank"),
    "misfit": (lambda folder: _rewrite(folder / BOTH[2], residuals={"0.weight": torch.ones(2)}), "does not fit"),
}


@pytest.fixture(scope="module")
def saved_by_two(worker_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint of two ranks, and the weights three steps after a resume from it without any residual."""
    folder = tmp_path_factory.mktemp("saved")
    worker_pool.run(_train_and_save, str(folder))
    assert hook_files(folder) == BOTH
    without = tmp_path_factory.mktemp("without") / "checkpoint"
    shutil.copytree(folder, without)
    for name in BOTH[1:]:
        (without / name).unlink()
    results = worker_pool.run(_resume, str(without))
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    return folder, results[0]["weights"]


@pytest.fixture
def checkpoint(saved_by_two: Any, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved_by_two[0], tmp_path / "checkpoint"))


@pytest.mark.parametrize("damage", DAMAGE_OF_ONE_RANK)
def test_where_one_rank_lacks_its_residual_all_do_without(
    run_ranks: Any, saved_by_two: Any, checkpoint: Path, damage: str
) -> None:
    intact = run_ranks(_resume, str(checkpoint))
    assert (intact[0]["weights"] - saved_by_two[1]).abs().max() > 1e-5
    change, text = DAMAGE_OF_ONE_RANK[damage]
    change(checkpoint)
    results = run_ranks(_resume, str(checkpoint))
    for result in results:
        assert torch.equal(result["weights"], saved_by_two[1])
        assert result["stats"]["step"] == 9 and result["stats"]["compressed_steps"] == 3
    # Rank 1 names its file, rank 0 says once what follows.
    assert len(results[1]["warnings"]) == 1 and str(checkpoint / BOTH[2]) in results[1]["warnings"][0]
    assert text in results[1]["warnings"][0]
    assert len(results[0]["warnings"]) == 1 and "all ranks start from residuals of zero" in results[0]["warnings"][0]


def test_another_world_size_needs_the_files_of_all(run_ranks: Any, checkpoint: Path) -> None:
    _truncate(checkpoint / BOTH[2])
    for result in run_ranks(_resume, str(checkpoint), world_size=3):
        assert result["loaded"] == {} and result["stats"]["step"] == 9
        assert "comm_hook_rank1.pt cannot be read" in result["warnings"][0]


DAMAGE_OF_THE_SHARED_FILE = {
    "truncated": (lambda folder: _truncate(folder / BOTH[0]), "comm_hook.pt cannot be read"),
    "missing": (lambda folder: (folder / BOTH[0]).unlink(), "comm_hook.pt is missing, though comm_hook_rank"),
    "changed": (lambda folder: _rewrite(folder / BOTH[0], step=7), "fingerprint do not belong together"),
    "newer": (lambda folder: _rewrite(folder / BOTH[0], version=99), "has version 99"),
    "foreign": (lambda folder: torch.save([1], folder / BOTH[0]), "not the state of a commhooks hook"),
}


@pytest.mark.parametrize("damage", DAMAGE_OF_THE_SHARED_FILE)
def test_a_bad_shared_file_is_an_error_on_every_rank_before_anything_changes(
    run_ranks: Any, checkpoint: Path, damage: str
) -> None:
    change, text = DAMAGE_OF_THE_SHARED_FILE[damage]
    change(checkpoint)
    for result in run_ranks(_fails_to_load, str(checkpoint)):
        assert text in result["error"] and str(checkpoint) in result["error"]


def test_no_code_of_a_checkpoint_is_run(run_ranks: Any, checkpoint: Path) -> None:
    torch.save({"format": os.system}, checkpoint / BOTH[0])
    for result in run_ranks(_fails_to_load, str(checkpoint)):
        assert "UnpicklingError" in result["error"]


def test_another_hook_is_an_error(run_ranks: Any, checkpoint: Path) -> None:
    for result in run_ranks(_fails_to_load, str(checkpoint), hook="batched_powerSGD"):
        assert "is of hook 'powerSGD', this one is 'batched_powerSGD'" in result["error"]


def test_another_hook_with_strict_off_begins_anew(run_ranks: Any, checkpoint: Path) -> None:
    options = OPTIONS | {"start_powerSGD_iter": 1}
    results = run_ranks(_resume, str(checkpoint), options=options, hook="batched_powerSGD", strict=False)
    for result in results:
        assert result["loaded"] == {}
        assert result["stats"]["step"] == 3 and result["stats"]["compressed_steps"] == 2
    assert "begins with fresh memory (strict=False)" in results[0]["warnings"][0]
    assert results[1]["warnings"] == []


@launched
def _other_model(folder: str) -> str:
    handler = power_sgd()
    accelerator = new_accelerator(handler)
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    before = flat(model.parameters())
    with pytest.raises(commhooks.PayloadError) as caught:
        accelerator.load_state(folder)
    assert torch.equal(flat(model.parameters()), before)
    return str(caught.value)


def test_another_model_is_an_error_that_lists_the_names(run_ranks: Any, checkpoint: Path) -> None:
    for error in run_ranks(_other_model, str(checkpoint)):
        assert "comm_hook.pt: the saved hook state is of another model" in error
        assert "7.weight: in the saved state, not in the model" in error
        assert "weight: in the model, not in the saved state" in error


@launched
def _save_fails(folder: str) -> None:
    run = Training().train(6).save(folder)
    real, files = torch.save, hook_files(folder)
    before = {name: (Path(folder) / name).read_bytes() for name in files}

    def disk_full(content: Any, path: Any, **kwargs: Any) -> None:
        real(content, path, **kwargs)
        raise OSError("No space left on device")

    run.train(1)
    run.accelerator.wait_for_everyone()
    with mock.patch.object(torch, "save", disk_full), pytest.raises(OSError, match="No space left"):
        run.accelerator.save_state(folder)
    run.accelerator.wait_for_everyone()
    assert hook_files(folder) == files == BOTH
    assert {name: (Path(folder) / name).read_bytes() for name in files} == before


def test_a_save_that_fails_leaves_the_old_files_whole(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_save_fails, str(tmp_path))


# ---- ways in which people save ---------------------------------------------------------------------------------------


@launched
def _save_on_main(folder: str, first_all: bool) -> dict[str, Any]:
    run = Training().train(5)
    if first_all:
        run.save(folder)
    run.train(1)
    with Warnings() as texts:
        if run.accelerator.is_main_process:
            run.accelerator.save_state(folder)
    run.train(3)  # no collective of the save meets those of the training
    run.accelerator.wait_for_everyone()
    return outcome(run) | {"warnings": texts}


@pytest.mark.parametrize("first_all", [False, True], ids=["alone", "over a save of all"])
def test_save_on_the_main_process_only(run_ranks: Any, saved_by_two: Any, tmp_path: Path, first_all: bool) -> None:
    saving = run_ranks(_save_on_main, str(tmp_path), first_all)
    assert torch.equal(saving[0]["weights"], saving[1]["weights"])
    assert saving[0]["warnings"] == []
    assert hook_files(tmp_path) == (BOTH if first_all else BOTH[:2])
    resumed = run_ranks(_resume, str(tmp_path))
    for result in resumed:  # the same as if nobody had saved a residual
        assert torch.equal(result["weights"], saved_by_two[1])
    assert ("is of another save" if first_all else "is missing") in resumed[1]["warnings"][0]


@launched
def _mean_on_main(folder: str) -> dict[str, Any]:
    run = Training(power_sgd(save_residual="mean")).train(6)
    run.hook.joint_save_limit_s = 0.5
    with Warnings() as texts:
        if run.accelerator.is_main_process:
            run.accelerator.save_state(folder)
    run.train(2)
    run.accelerator.wait_for_everyone()
    run.save(folder + "/all")  # a later save that all ranks join is exact again
    return outcome(run) | {"warnings": texts}


def test_the_mean_on_the_main_process_only_is_marked(run_ranks: Any, saved_by_two: Any, tmp_path: Path) -> None:
    saving = run_ranks(_mean_on_main, str(tmp_path))
    assert "without residuals, because not every rank took part within 0.5 s" in saving[0]["warnings"][0]
    assert not torch.load(tmp_path / BOTH[0], weights_only=True)["exact"]
    assert torch.load(tmp_path / "all" / BOTH[0], weights_only=True)["exact"]
    resumed = run_ranks(_resume, str(tmp_path), save_residual="mean")
    assert torch.equal(resumed[1]["weights"], saved_by_two[1])
    assert "marked inexact" in resumed[0]["warnings"][0]


@launched
def _automatic_naming(folder: str) -> dict[str, Any]:
    def config() -> ProjectConfiguration:
        return ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)

    run = Training(project_config=config())
    for _ in range(3):
        run.train(2).save()
    run.train(3)
    resumed = Training.resumed(None, 6, project_config=config()).train(3)
    return {"run": outcome(run), "resumed": outcome(resumed)}


def test_automatic_naming_with_a_limit(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_automatic_naming, str(tmp_path)):
        assert_equal(result["run"], result["resumed"])
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert folders == ["checkpoint_1", "checkpoint_2"]
    assert all(hook_files(tmp_path / "checkpoints" / name) == BOTH for name in folders)


def _two_nodes(folder: str) -> dict[str, Any]:
    """Each rank is a node with a disk of its own."""
    mine = f"{folder}/node{dist.get_rank()}"
    config = ProjectConfiguration(save_on_each_node=True)
    with accelerate_launched(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"):
        run = Training(project_config=config).train(6).save(mine)
        assert run.accelerator.is_local_main_process
        files = hook_files(mine)
        run.train(3)
        return {"run": outcome(run), "resumed": outcome(Training.resumed(mine, 6).train(3)), "files": files}


def test_save_on_each_node(run_ranks: Any, tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(_two_nodes, str(tmp_path))):
        assert_equal(result["run"], result["resumed"])
        assert result["files"] == ["comm_hook.pt", f"comm_hook_rank{rank}.pt"]


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


# ---- ways in which people load ---------------------------------------------------------------------------------------


@launched
def _load_before_prepare(folder: str) -> dict[str, Any]:
    handler = power_sgd(WRONG)
    accelerator = new_accelerator()
    handler.attach(accelerator)
    accelerator.load_state(folder)
    early = Training(handler, accelerator=accelerator)
    kept = outcome(early)
    # Accelerate restores no weights then, so these come the usual way, which must not disturb the hook.
    again = outcome(early.load(folder, 6))
    return {"kept": kept, "again": again, "trained": outcome(early.train(3))}


def test_load_before_prepare(run_ranks: Any, checkpoint: Path) -> None:
    intact = run_ranks(_resume, str(checkpoint))
    for result, expected in zip(run_ranks(_load_before_prepare, str(checkpoint)), intact, strict=True):
        for when in ("kept", "again"):
            assert result[when]["stats"]["step"] == 6
            assert all(torch.equal(result[when]["residuals"][k], v) for k, v in expected["loaded"].items())
        assert_equal(result["trained"], expected)


@launched
def _rewind(folder: str) -> dict[str, Any]:
    run = Training().train(6).save(folder).train(3)
    through = outcome(run)
    run.train(2).load(folder, 6).load(folder, 6).train(3)
    return {"through": through, "rewound": outcome(run)}


def test_load_twice_and_into_a_running_hook(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_rewind, str(tmp_path)):
        assert_equal(result["through"], result["rewound"])


@launched
def _loaded_on_one_rank(folder: str) -> str:
    run = Training(power_sgd(WRONG))
    if run.accelerator.process_index == 1:
        run.accelerator.load_state(folder)
    with pytest.raises(commhooks.HookRunError) as caught:
        run.train(1)
    return str(caught.value)


def test_loading_on_some_ranks_only_is_an_error_on_all(run_ranks: Any, checkpoint: Path) -> None:
    for error in run_ranks(_loaded_on_one_rank, str(checkpoint)):
        assert "rank 0: 0, rank 1: 6" in error


# ---- several models, and models that go ------------------------------------------------------------------------------


class Pair:
    """Two models of one shape with different gradients, and an evaluation-mode model that is prepared before them."""

    def __init__(self, options: Any = OPTIONS, *, one_by_one: bool = False, folder: str | None = None) -> None:
        self.handler = power_sgd(options)
        self.accelerator = new_accelerator(self.handler)
        self.accelerator.prepare_model(make_model(), evaluation_mode=True)
        self.first = self.accelerator.prepare(make_model())
        self.first_hook = self.handler.attached
        if one_by_one:
            self.accelerator.load_state(folder)
        self.second = self.accelerator.prepare(make_model())
        self.second_hook = self.handler.attached

    def train(self, start: int, steps: int) -> Pair:
        for step in range(start, start + steps):
            for factor, model in ((1, self.first), (3, self.second)):
                images, labels = batch(step, self.accelerator.process_index)
                self.accelerator.backward(torch.nn.functional.cross_entropy(model(factor * images), labels))
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.05 * parameter.grad
                        parameter.grad = None
        return self

    def memory(self) -> list[torch.Tensor]:
        hooks = (self.first_hook, self.second_hook)
        return [residuals(hook)["5.weight"] for hook in hooks] + [flat(self.second.parameters())]


@launched
def _two_models(folder: str) -> list[list[torch.Tensor]]:
    pair = Pair().train(0, 5)
    assert len(pair.handler.attached_hooks) == 2
    pair.accelerator.save_state(folder)
    pair.accelerator.wait_for_everyone()
    resumed = Pair(WRONG)
    resumed.accelerator.load_state(folder)
    piecemeal = Pair(WRONG, one_by_one=True, folder=folder)
    at_load = [each.memory()[:2] for each in (pair, resumed, piecemeal)]
    return [*at_load, pair.train(5, 2).memory(), resumed.train(5, 2).memory()]


def test_two_models_have_a_state_each(run_ranks: Any, tmp_path: Path) -> None:
    for saved, resumed, piecemeal, through, again in run_ranks(_two_models, str(tmp_path)):
        assert not torch.equal(saved[0], saved[1])
        # The second model was prepared after the load: its hook took over what was kept for it.
        for other in (resumed, piecemeal):
            assert torch.equal(saved[0], other[0]) and torch.equal(saved[1], other[1])
        assert all(torch.equal(a, b) for a, b in zip(through, again, strict=True))
    assert hook_files(tmp_path) == sorted([*BOTH, *(name.replace("hook", "hook_1") for name in BOTH)])


@launched
def _second_file_damaged(folder: str) -> None:
    pair = Pair().train(0, 4)
    before = pair.memory()
    with pytest.raises(commhooks.PayloadError, match="comm_hook_1.pt"):
        pair.accelerator.load_state(folder)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.memory(), strict=True))
    assert pair.first_hook.stats()["step"] == 4


def test_an_error_in_the_second_file_leaves_the_first_model_alone(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_two_models, str(tmp_path))
    _truncate(tmp_path / "comm_hook_1.pt")
    run_ranks(_second_file_damaged, str(tmp_path))


@launched
def _freed_and_gone(folder: str) -> dict[str, Any]:
    pair = Pair().train(0, 5)
    second = residuals(pair.second_hook)["5.weight"]
    pair.first = pair.first_hook = None
    gc.collect()
    assert pair.handler.attached_hooks == [pair.second_hook]
    pair.accelerator.save_state(folder + "/gone")
    pair.accelerator.wait_for_everyone()
    part = torch.load(f"{folder}/gone/comm_hook_1_rank{pair.accelerator.process_index}.pt", weights_only=True)
    kept_its_number = torch.equal(part["residuals"]["5.weight"].flatten(), second)

    stale = pair.second  # a variable that `free_memory` knows nothing of
    pair.accelerator.free_memory()
    pair.second = pair.accelerator.prepare(make_model())
    hook = pair.handler.attached
    fresh = hook.stats()["step"] == 0 and not residuals(hook)
    pair.accelerator.save_state(folder + "/freed")
    pair.accelerator.wait_for_everyone()
    step = torch.load(folder + "/freed/comm_hook.pt", weights_only=True)["step"]
    return {"kept its number": kept_its_number, "fresh": fresh, "step": step, "stale": pair.handler.is_attached(stale)}


def test_models_that_go_and_free_memory(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_freed_and_gone, str(tmp_path)):
        assert result == {"kept its number": True, "fresh": True, "step": 0, "stale": True}
    assert hook_files(tmp_path / "gone") == [name.replace("hook", "hook_1") for name in BOTH]
    assert hook_files(tmp_path / "freed") == BOTH[:1]


@launched
def _freed_then_loaded(folder: str) -> dict[str, Any]:
    run = Training().train(6).save(folder)
    kept = run.model  # alive in a variable while the accelerator has forgotten it
    run.accelerator.free_memory()
    run.accelerator.load_state(folder)
    again = Training(run.handler, accelerator=run.accelerator)
    assert kept is not again.model
    return outcome(again)


def test_free_memory_then_load_before_prepare(run_ranks: Any, checkpoint: Path) -> None:
    for result in run_ranks(_freed_then_loaded, str(checkpoint)):
        assert result["stats"]["step"] == 6 and result["residuals"]


@launched
def _prepared_twice(folder: str) -> dict[str, Any]:
    handler = power_sgd()
    accelerator = new_accelerator(handler)
    module, other = make_model(), make_model()
    first, second = accelerator.prepare(module, other)
    third = accelerator.prepare(module)  # a DDP model of its own around the same module
    hooks = handler.attached_hooks
    accelerator.backward(third(torch.ones(2, 1, 8, 8)).sum())
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    steps = [torch.load(f"{folder}/comm_hook{n}.pt", weights_only=True)["step"] for n in ("", "_1")]
    again = accelerator.prepare(third)
    return {"hooks": len(hooks), "steps": steps, "same": again is third, "latest": handler.attached is hooks[2]}


def test_a_module_that_is_prepared_twice_keeps_its_number(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_prepared_twice, str(tmp_path)):
        assert result == {"hooks": 3, "steps": [1, 0], "same": True, "latest": True}
    assert hook_files(tmp_path) == ["comm_hook.pt", "comm_hook_1.pt"]


# ---- no hook, or one of the user's own -------------------------------------------------------------------------------


def _one_process(folder: str, made_by_two: str) -> dict[str, Any]:
    """A plain script without a launcher: Accelerate does not wrap in DDP, and there is nothing to attach a hook to."""
    with accelerate_launched(none=True), Warnings() as texts:
        handler = power_sgd()
        run = Training(handler, accelerator=Accelerator(kwargs_handlers=[handler]))
        run.train(1).save(folder).load(made_by_two, 6).train(1)
        attached = handler.attached or handler.is_attached(run.model)
        return {"attached": attached, "files": hook_files(folder), "warnings": texts}


def test_one_process_has_no_hook(run_ranks: Any, checkpoint: Path, tmp_path: Path) -> None:
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
