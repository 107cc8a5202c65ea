"""`accelerator.save_state` with a hook, on real ranks, and what resumes from it: the table in docs/accelerate.md."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerate_checkpoints import BOTH, assert_equal, outcome, resume, train_and_save
from tests.support.accelerators import (
    OPTIONS,
    WRONG,
    Training,
    Warnings,
    accelerate_launched,
    hook_files,
    launched,
    power_sgd,
)
from tests.support.inside import session_of
from tests.support.models import relative_error

# ---- the ordinary way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save_at", "handler"),
    [(2, {}), (3, {"save_residual": "mean"}), (6, {}), (6, {"save_residual": "mean"}), (6, {"wrapper": "bf16"})],
)
def test_resume_is_bit_equal(run_ranks: Any, tmp_path: Path, save_at: int, handler: dict[str, Any]) -> None:
    through = run_ranks(train_and_save, str(tmp_path), save_at, 9 - save_at, **handler)
    resumed = run_ranks(resume, str(tmp_path), save_at, 9 - save_at, **handler)
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
    through = run_ranks(train_and_save, str(tmp_path))
    for path in tmp_path.glob("comm_hook*"):
        path.unlink()
    resumed = run_ranks(resume, str(tmp_path), options=OPTIONS)
    assert (resumed[0]["weights"] - through[0]["weights"]).abs().max() > 1e-4
    assert torch.equal(resumed[0]["weights"], resumed[1]["weights"])
    assert len(resumed[0]["warnings"]) == 1 and resumed[1]["warnings"] == []
    assert "holds no state of a communication hook (comm_hook.pt)" in resumed[0]["warnings"][0]


def test_drop_saves_no_residual(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(train_and_save, str(tmp_path))  # whose files of ranks go when the same folder is saved to
    run_ranks(train_and_save, str(tmp_path), save_residual="drop")
    assert hook_files(tmp_path) == BOTH[:1]
    for result in run_ranks(resume, str(tmp_path)):
        assert result["loaded"] == {}
        assert result["stats"]["step"] == 9
        assert result["warnings"] == []


@pytest.mark.parametrize(
    ("before", "after", "save_residual"), [(2, 1, "per_rank"), (2, 3, "per_rank"), (1, 2, "mean"), (3, 2, "mean")]
)
def test_another_world_size(run_ranks: Any, tmp_path: Path, before: int, after: int, save_residual: str) -> None:
    saved = run_ranks(train_and_save, str(tmp_path), world_size=before, save_residual=save_residual)
    resumed = run_ranks(resume, str(tmp_path), world_size=after, save_residual=save_residual)
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


@launched
def _scaled(folder: str) -> dict[str, Any]:
    run = Training(scale=64.0).train(6).save(folder).train(3)
    resumed = Training.resumed(folder, 6, scale=2.0)
    # The scale has grown at the end of the step whose residual was saved.
    assert resumed.accelerator.scaler.get_scale() == session_of(resumed.hook).state.loss_scale * 2 == 256
    return {"run": outcome(run), "resumed": outcome(resumed.train(3))}


def test_the_loss_scale_is_saved_with_the_residual(run_ranks: Any, tmp_path: Path) -> None:
    for result in run_ranks(_scaled, str(tmp_path)):
        assert_equal(result["run"], result["resumed"])


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
    resumed = run_ranks(resume, str(tmp_path))
    for result in resumed:  # the same as if nobody had saved a residual
        assert torch.equal(result["weights"], saved_by_two[1])
    assert ("is of another save" if first_all else "is missing") in resumed[1]["warnings"][0]


@launched
def _two_runs_in_a_folder(folder: str) -> list[str]:
    """Both save at the same step, the second one on the main process only."""
    for number in range(2):
        run = Training(CommHookKwargs(hook="int8")).train(4)
        if number == 0 or run.accelerator.is_main_process:
            run.accelerator.save_state(folder)
        run.accelerator.wait_for_everyone()
    with Warnings() as texts:
        Training(CommHookKwargs(hook="int8")).load(folder, 4)
    return list(texts)


def test_residuals_of_another_run_are_noticed(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_two_runs_in_a_folder, str(tmp_path))
    assert not any("another save" in text for text in first)
    assert any("comm_hook_rank1.pt is of another save" in text for text in second), second


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
    resumed = run_ranks(resume, str(tmp_path), save_residual="mean")
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


@launched
def _between_nodes(folder: str, exclude: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"ranks_per_node": 2, "save_residual": "per_rank"}
    run = Training(power_sgd(OPTIONS | {"exclude": exclude}, **settings)).train(5).save(folder)
    resumed = Training.resumed(folder, 5, power_sgd(WRONG | {"exclude": exclude}, **settings)).train(4)
    return {
        "whole": run.train(4).weights(),
        "resumed": resumed.weights(),
        "stats": resumed.hook.stats(),
        "owned": len(session_of(resumed.hook).state["residual"]),
    }


def test_ranks_in_nodes_resume_exactly(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_between_nodes, str(tmp_path / "saved"), [], world_size=4)
    for rank in ranks:
        assert torch.equal(rank["whole"], rank["resumed"]) and torch.equal(rank["whole"], ranks[0]["whole"])
        assert rank["stats"]["compressed_steps"] == 4 and rank["stats"]["bytes_inside_nodes"] > 0
    assert sum(rank["owned"] for rank in ranks[:2]) == sum(rank["owned"] for rank in ranks[2:]) > ranks[0]["owned"]


@pytest.mark.parametrize(("exclude", "owner"), [(["0.*", "3.*", "7.*"], 1), (["0.*", "5.*", "7.*"], 0)])
def test_ranks_that_own_nothing_resume(run_ranks: Any, tmp_path: Path, exclude: list[str], owner: int) -> None:
    """One matrix is compressed, so that one rank of a node has residuals, and the other none."""
    ranks = run_ranks(_between_nodes, str(tmp_path / "saved"), exclude, world_size=4)
    assert [rank["owned"] for rank in ranks] == [int(number % 2 == owner) for number in range(4)]
    for rank in ranks:
        # Not to the last bit: what is not compressed is summed over four ranks in an order that follows the buckets.
        assert relative_error(rank["resumed"], rank["whole"]) < 1e-6
