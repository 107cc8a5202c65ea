"""A full disk, a folder that cannot be written, a write that was interrupted: what was saved before
stays whole.
"""

import contextlib
import gc
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from accelerate_commhooks.saving import write_together
from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from tests.support import lightning_support as support
from tests.support.accelerators import WRONG, Training, Warnings, launched, power_sgd
from tests.support.training import residuals

LARGE = {"large": torch.arange(50_000.0)}


@contextlib.contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """In this process a file that grows beyond it meets an error of the operating system, as on a
    full disk.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


# --------------------------------------------------------------------------------------------------
# files as such


def _write_both(folder: Path, value: Any) -> None:
    write_together(
        [(folder / "a.pt", {"small": value}), (folder / "b.pt", LARGE), (folder / "old.pt", None)],
        3,
    )


def _contents(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


def test_files_change_together_or_not_at_all(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt", "old.pt"):
        torch.save({"before": name}, tmp_path / name)
    before = _contents(tmp_path)
    with files_up_to(20_000), pytest.raises(OSError, match="File too large: '.*/b.pt'"):
        _write_both(tmp_path, 1)
    assert _contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 3  # no temporary file is left
    _write_both(tmp_path, 2)
    assert _contents(tmp_path).keys() == {"a.pt", "b.pt"}
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"small": 2}


def test_files_are_removed_after_the_others_are_in_place(tmp_path: Path) -> None:
    """Of a save that ends between, the old shared file needs the part, and the new one ignores
    it.
    """
    torch.save({"before": 1}, tmp_path / "part.pt")
    with mock.patch("os.replace", side_effect=OSError(5, "no")), pytest.raises(OSError):
        write_together([(tmp_path / "part.pt", None), (tmp_path / "shared.pt", {"small": 1})], 0)
    assert (tmp_path / "part.pt").exists()


def test_the_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / ".a.pt.0.tmp").symlink_to("/dev/full")
    for path, text in (
        (tmp_path / "a.pt", "No space left on device"),
        (tmp_path / "file" / "a.pt", "Not a directory"),
        (tmp_path / "gone" / "a.pt", "No such file or directory"),
        (Path("/proc/a.pt"), ""),  # where nobody may make a file, not even root
    ):
        with pytest.raises(OSError, match=f"{text}: '{path}'"):
            write_together([(path, LARGE)], 0)


def test_another_error_leaves_the_files_alone(tmp_path: Path) -> None:
    _write_both(tmp_path, 1)
    before = _contents(tmp_path)["a.pt"]
    with pytest.raises(KeyboardInterrupt):
        write_together(_interrupted(tmp_path), 3)
    assert _contents(tmp_path)["a.pt"] == before
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(RuntimeError, match="only Tensors"):
        write_together([(tmp_path / "a.pt", {"value": _Unsaveable()})], 3)
    assert _contents(tmp_path)["a.pt"] == before


def _interrupted(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    yield folder / "a.pt", {"small": 2}
    raise KeyboardInterrupt


class _Unsaveable:
    def __reduce__(self) -> Any:
        raise RuntimeError("only Tensors")


# --------------------------------------------------------------------------------------------------
# Accelerate


@launched
def _save_fails(folder: str, ranks: list[int]) -> dict[str, Any]:
    """Saved after 4 steps; the save after 5 fails on `ranks`; training goes on to 6."""
    undisturbed = Training().train(6).weights()
    run = Training().train(4).save(folder)
    saved = residuals(run.hook)
    run.train(1)
    error = ""
    blocked = dist.get_rank() in ranks
    with files_up_to(20_000) if blocked else contextlib.nullcontext():
        try:
            run.accelerator.save_state(folder)
        except OSError as caught:
            error = str(caught)
    return {
        "error": error,
        "saved": saved,
        "as if alone": torch.equal(run.train(1).weights(), undisturbed),
    }


@launched
def _resume(folder: str, step: int) -> dict[str, Any]:
    with Warnings() as texts:
        run = Training.resumed(folder, step, power_sgd(WRONG))
        loaded = residuals(run.hook)
        run.train(6 - step)
    return {"loaded": loaded, "weights": run.weights(), "warnings": texts}


def test_a_full_disk_leaves_the_checkpoint_before(run_ranks: Any, tmp_path: Path) -> None:
    """And what a killed save has left behind harms nothing."""
    for name in (".comm_hook.pt.0.tmp", ".comm_hook_rank1.pt.1.tmp", ".comm_hook_1.pt.0.tmp"):
        (tmp_path / name).write_bytes(b"half")
    before = run_ranks(_save_fails, str(tmp_path), [0, 1])
    for rank, (one, again) in enumerate(
        zip(before, run_ranks(_resume, str(tmp_path), 4), strict=True)
    ):
        assert one["error"].endswith(f"File too large: '{tmp_path}/comm_hook_rank{rank}.pt'")
        assert one["as if alone"]
        assert again["warnings"] == []
        assert one["saved"] and one["saved"].keys() == again["loaded"].keys()
        assert all(torch.equal(one["saved"][name], again["loaded"][name]) for name in one["saved"])
    assert [path.name for path in tmp_path.glob(".*")] == [".comm_hook_1.pt.0.tmp"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_holds_up_no_other(
    run_ranks: Any, tmp_path: Path, rank: int
) -> None:
    before = run_ranks(_save_fails, str(tmp_path), [rank])
    assert [bool(one["error"]) for one in before] == [rank == 0, rank == 1]
    assert all(one["as if alone"] for one in before)
    # The others have saved again. What does not belong together is found out; nothing is taken for
    # something else.
    after = run_ranks(_resume, str(tmp_path), 4 if rank == 0 else 5)
    assert torch.equal(after[0]["weights"], after[1]["weights"])
    assert any("all ranks start from residuals of zero" in text for text in after[0]["warnings"])
    assert any("is of another save" in text for text in after[1]["warnings"])


# --------------------------------------------------------------------------------------------------
# Lightning


def _trainer_cannot_write(root: str, ours: bool) -> dict[str, Any]:
    """Rank 0, which writes for all, meets a full disk at the end of the second epoch."""

    class FullLater(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            full = trainer.global_step > support.STEPS_PER_EPOCH and dist.get_rank() == 0
            with files_up_to(4_000) if full else contextlib.nullcontext():
                super()._save_checkpoint(trainer, filepath)

    options = {"bucket_cap_mb": support.SEVERAL_BUCKETS_MB}
    t = support.trainer(
        root,
        strategy=support.strategy(**options) if ours else DDPStrategy(**options),
        max_epochs=3,
        callbacks=[FullLater(root, filename="{step}", save_top_k=-1)],
    )
    result = {}
    try:
        t.fit(support.Model(), support.data())
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error), "step": t.global_step}
    # As the end of the process would: connections close when nobody holds the group, and
    # `comm_hook` does.
    del t, options
    gc.collect()
    dist.destroy_process_group()
    return result


def test_a_full_disk_under_lightning_is_as_without_a_hook(run_ranks: Any, tmp_path: Path) -> None:
    results = {}
    for name, ours in (("ours", True), ("plain", False)):
        results[name] = run_ranks(_trainer_cannot_write, str(tmp_path / name), ours)
        step = support.STEPS_PER_EPOCH
        # Lightning writes elsewhere first: a checkpoint is there whole or not at all.
        assert [path.name for path in (tmp_path / name).glob("*")] == [f"step={step}.ckpt"]
        checkpoint = torch.load(tmp_path / name / f"step={step}.ckpt", weights_only=True)
        assert checkpoint["global_step"] == step
        assert (CHECKPOINT_KEY in checkpoint) == ours
    for ours, plain in zip(results["ours"], results["plain"], strict=True):
        assert (
            ours["error"] == plain["error"]
            and ours["step"] == plain["step"] == 2 * support.STEPS_PER_EPOCH
        )
    assert (
        "File too large" in results["ours"][0]["text"]
        and "File too large" in results["plain"][0]["text"]
    )
