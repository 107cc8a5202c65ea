"""What can be wrong with the files of a hook when `accelerator.load_state` reads them. All that can be wrong with their
contents, `checkpoint/test_payload_parts.py` has."""

from pathlib import Path
from typing import Any

import pytest
import torch

import commhooks
from tests.support.accelerate_checkpoints import BOTH, assert_equal, outcome, resume, truncate
from tests.support.accelerators import OPTIONS, WRONG, Training, launched, power_sgd


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


def _rewrite(path: Path, **changes: Any) -> None:
    torch.save(torch.load(path, weights_only=True) | changes, path)


DAMAGE_OF_ONE_RANK = {
    "missing": (lambda folder: (folder / BOTH[2]).unlink(), "is missing"),
    "truncated": (lambda folder: truncate(folder / BOTH[2]), "cannot be read: it is cut off after "),
    "empty": (lambda folder: (folder / BOTH[2]).write_bytes(b""), "cannot be read: it is empty"),
    "of another save": (lambda folder: _rewrite(folder / BOTH[2], fingerprint="0"), "is of another save"),
    "of another rank": (lambda folder: _rewrite(folder / BOTH[2], rank=0), "is of rank 0, not of rank 1"),
}


@pytest.mark.parametrize("damage", DAMAGE_OF_ONE_RANK)
def test_where_one_rank_lacks_its_residual_all_do_without(
    run_ranks: Any, saved_by_two: Any, checkpoint: Path, damage: str
) -> None:
    intact = run_ranks(resume, str(checkpoint))
    assert (intact[0]["weights"] - saved_by_two[1]).abs().max() > 1e-5
    change, text = DAMAGE_OF_ONE_RANK[damage]
    change(checkpoint)
    results = run_ranks(resume, str(checkpoint))
    for result in results:
        assert torch.equal(result["weights"], saved_by_two[1])
        assert result["stats"]["step"] == 9 and result["stats"]["compressed_steps"] == 3
    # Rank 1 names its file, rank 0 says once what follows.
    assert len(results[1]["warnings"]) == 1 and str(checkpoint / BOTH[2]) in results[1]["warnings"][0]
    assert text in results[1]["warnings"][0]
    assert len(results[0]["warnings"]) == 1 and "all ranks start from residuals of zero" in results[0]["warnings"][0]


def test_another_world_size_needs_the_files_of_all(run_ranks: Any, checkpoint: Path) -> None:
    truncate(checkpoint / BOTH[2])
    for result in run_ranks(resume, str(checkpoint), world_size=3):
        assert result["loaded"] == {} and result["stats"]["step"] == 9
        assert "comm_hook_rank1.pt cannot be read" in result["warnings"][0]


DAMAGE_OF_THE_SHARED_FILE = {
    "truncated": (lambda folder: truncate(folder / BOTH[0]), "comm_hook.pt cannot be read: it is cut off after "),
    "missing": (lambda folder: (folder / BOTH[0]).unlink(), "comm_hook.pt is missing, though comm_hook_rank"),
    "changed": (lambda folder: _rewrite(folder / BOTH[0], step=7), "fingerprint do not belong together"),
}


@pytest.mark.parametrize("damage", DAMAGE_OF_THE_SHARED_FILE)
def test_a_bad_shared_file_is_an_error_on_every_rank_before_anything_changes(
    run_ranks: Any, checkpoint: Path, damage: str
) -> None:
    change, text = DAMAGE_OF_THE_SHARED_FILE[damage]
    change(checkpoint)
    for result in run_ranks(_fails_to_load, str(checkpoint)):
        assert text in result["error"] and str(checkpoint) in result["error"]
        assert "Load another checkpoint, or remove its comm_hook*.pt files" in result["error"]


def test_another_hook_is_an_error(run_ranks: Any, checkpoint: Path) -> None:
    for result in run_ranks(_fails_to_load, str(checkpoint), hook="batched_powerSGD"):
        assert result["error"].startswith(f"{checkpoint / BOTH[0]}: ")
        assert "is of hook 'powerSGD', this one is 'batched_powerSGD'" in result["error"]


def test_another_hook_with_strict_off_begins_anew(run_ranks: Any, checkpoint: Path) -> None:
    options = OPTIONS | {"start_powerSGD_iter": 1}
    results = run_ranks(resume, str(checkpoint), options=options, hook="batched_powerSGD", strict=False)
    for result in results:
        assert result["loaded"] == {}
        assert result["stats"]["step"] == 3 and result["stats"]["compressed_steps"] == 2
    assert "begins with fresh memory (strict=False)" in results[0]["warnings"][0]
    assert results[1]["warnings"] == []
