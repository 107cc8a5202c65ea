"""Files: parts that belong together, types that may be in them, and writes that fail.

After a full disk, a folder that cannot be written or an interrupted write, the previous checkpoint
is still whole.
"""

import collections
import contextlib
import copy
import gc
import io
import pickle
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from accelerate_commhooks.saving import write_together
from commhooks import PayloadError
from commhooks.checkpoint.parts import (
    check_shared,
    merge,
    problem_of_part,
    ranks_needed,
    save_id,
    split,
)
from commhooks.checkpoint.user_state import plain_types_problem
from commhooks.comm.counters import CONTINUED
from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from tests.support import lightning_support as support
from tests.support.accelerators import WRONG, Training, Warnings, launched, power_sgd
from tests.support.models import bits_equal, same
from tests.support.training import residuals

# ---- a payload in parts


def payload_of(rank: int, world_size: int = 2, **changes: Any) -> dict[str, Any]:
    """Make what `state_dict()` returns on `rank`: the residual is full of 1 + rank."""
    q = torch.arange(6, dtype=torch.float32).view(2, 3)
    residual = torch.full((4, 3), 1.0 + rank)
    saved: dict[str, Any] = {
        "format": "commhooks",
        "version": 1,
        "hook": "powerSGD",
        "options": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3},
        "step": 7,
        "nonfinite_steps": 0,
        "counters": dict.fromkeys(CONTINUED, 0),
        "world_size": world_size,
        "loss_scale": 1.0,
        "exact": True,
        "residual": "per_rank",
        "residual_ranks": [rank],
        "parameters": {
            "weight": {"shape": [4, 3], "row_dim": 0, "q": q, "residual": [residual]},
            "bias": {"shape": [4], "row_dim": 0, "q": None, "residual": None},
        },
        "batched_q": {},
        "hook_state": None,
    }
    return saved | changes


def through_a_file(content: dict[str, Any] | None) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def parts_of(world_size: int) -> tuple[dict[str, Any], list[Any]]:
    """Return the shared part, which is the same on every rank, and the part of each rank."""
    split_up = [split(payload_of(rank, world_size), rank) for rank in range(world_size)]
    shared = split_up[0][0]
    assert all(same(shared, other) for other, _ in split_up)
    return check_shared(through_a_file(shared)), [through_a_file(part) for _, part in split_up]


def test_parts_join_to_what_was_saved() -> None:
    shared, parts = parts_of(2)
    for rank in range(2):
        assert ranks_needed(shared, rank, 2) == [rank]
        assert problem_of_part(shared, parts[rank], rank) is None
        assert same(merge(shared, [parts[rank]], rank, 2), payload_of(rank))


def test_only_the_part_of_a_rank_holds_its_residual() -> None:
    saved = payload_of(1)
    before = copy.deepcopy(saved)
    shared, part = split(saved, 1)
    assert same(saved, before)
    assert part is not None and set(part["residuals"]) == {"weight"}
    assert shared["parameters"]["weight"]["residual"] == []
    assert shared["parameters"]["bias"]["residual"] is None


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_size_loads_the_mean(world_size: int) -> None:
    shared, parts = parts_of(2)
    assert ranks_needed(shared, 0, world_size) == [0, 1]
    merged = merge(shared, iter(parts), 0, world_size)
    assert merged["residual"] == "mean" and merged["residual_ranks"] == [0, 1]
    assert torch.equal(merged["parameters"]["weight"]["residual"], torch.full((4, 3), 1.5))
    assert merged["parameters"]["bias"]["residual"] is None


def test_a_rank_without_an_entry_has_zeros_there() -> None:
    shared, parts = parts_of(2)
    parts[1]["residuals"].clear()
    merged = merge(shared, parts, 0, 1)
    assert torch.equal(merged["parameters"]["weight"]["residual"], torch.full((4, 3), 0.5))
    assert merge(shared, [parts[1]], 1, 2)["parameters"]["weight"]["residual"] is None


@pytest.mark.parametrize("parts", [[None], [None, None]])
def test_a_missing_part_is_not_taken_for_residuals_of_zero(parts: list[None]) -> None:
    shared, _ = parts_of(2)
    merged = merge(shared, parts, 0, 2 if len(parts) == 1 else 3)
    assert merged["residual"] == "per_rank" and merged["residual_ranks"] == []
    assert merged["parameters"]["weight"]["residual"] == []


def test_a_mean_and_no_residuals_need_no_parts() -> None:
    mean = payload_of(0, residual="mean", residual_ranks=[0, 1])
    mean["parameters"]["weight"]["residual"] = torch.ones(4, 3)
    without = payload_of(0)
    without["parameters"]["weight"]["residual"] = None
    for saved in (mean, without):
        shared, part = split(saved, 0)
        assert part is None
        assert ranks_needed(shared, 0, 2) == ranks_needed(shared, 0, 3) == []
        assert merge(shared, [], 0, 3).keys() == saved.keys()


def test_only_the_residuals_of_one_rank_can_be_split() -> None:
    with pytest.raises(ValueError, match="expected the residuals of rank 0 only"):
        split(payload_of(1), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 8},
        {"hook": "batched_powerSGD"},
        {"options": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 4}},
        {"loss_scale": 2.0},
        {"world_size": 3},
        {"batched_q": {"batched.0": torch.ones(1, 2)}},
    ],
)
def test_the_fingerprint_covers_what_all_ranks_share(changes: dict[str, Any]) -> None:
    assert save_id(payload_of(0)) == save_id(payload_of(1))
    assert save_id(payload_of(0)) != save_id(payload_of(0) | changes)


def test_the_fingerprint_covers_every_number_of_q() -> None:
    saved = payload_of(0)
    saved["parameters"]["weight"]["q"] = saved["parameters"]["weight"]["q"].clone()
    saved["parameters"]["weight"]["q"][1, 2] += 1e-6
    assert save_id(saved) != save_id(payload_of(0))
    # Where the numbers lie in memory does not matter.
    saved["parameters"]["weight"]["q"] = (
        payload_of(0)["parameters"]["weight"]["q"].t().contiguous().t()
    )
    assert save_id(saved) == save_id(payload_of(0))


def test_the_fingerprint_of_a_payload_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in checkpoints: with another value, every older residual would count as stale."""
    monkeypatch.setattr(torch.Tensor, "numpy", None)  # numpy may not be installed
    assert (
        save_id(payload_of(0)) == "08e1922381047925b340a051686ac234641b710402fc5fd96e66474d8992d2f3"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "commhooks"}, "is not the part of one rank"),
        ({"version": 2}, "is not the part of one rank"),
        ({"fingerprint": "0"}, "is of another save"),
        ({"rank": 0}, "is of rank 0, not of rank 1"),
        ({"residuals": None}, "has no residuals"),
        ({"residuals": {"weight": None}}, "has a residual for 'weight' that does not fit"),
        ({"residuals": {"weight": [0.0]}}, "has a residual for 'weight' that does not fit"),
        (
            {"residuals": {"weight": torch.ones(3, 4)}},
            "has a residual for 'weight' that does not fit",
        ),
        (
            {"residuals": {"weight": torch.ones(4, 3).long()}},
            "has a residual for 'weight' that does not fit",
        ),
        (
            {"residuals": {"other": torch.ones(4, 3)}},
            "has a residual for 'other' that does not fit",
        ),
        (
            {"residuals": {"weight": torch.full((4, 3), float("nan"))}},
            "for 'weight' that does not fit .*inf or NaN",
        ),
        (
            {"residuals": {"weight": torch.ones(1).expand(4, 3)}},
            "for 'weight' that does not fit .*more elements",
        ),
    ],
)
def test_a_part_that_does_not_belong_is_explained(changes: dict[str, Any], problem: str) -> None:
    shared, parts = parts_of(2)
    assert re.search(problem, str(problem_of_part(shared, parts[1] | changes, 1)))
    assert "is not the part of one rank" in str(problem_of_part(shared, None, 1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": 8}, "its content and its fingerprint"),
        ({"parameters": {"weight": {}}}, "'weight'.* has no 'shape'"),
        ({"parameters": []}, "'parameters' is not a dict"),
        ({"batched_q": {"a": 1}}, "batched_q has a key 'a'"),
        ({"world_size": 2**40}, "'world_size' is 1099511627776"),
        ({"fingerprint": None}, "its content and its fingerprint"),
        ({"version": 2}, "has format version 2"),
        ({"format": "x"}, "not the state of a commhooks hook"),
    ],
)
def test_a_damaged_shared_part_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        check_shared(parts_of(2)[0] | changes)


def test_each_rank_has_its_own_state_of_a_users_hook() -> None:
    saved = {
        "format": "commhooks",
        "version": 1,
        "hook": "mine",
        "options": {},
        "step": 3,
        "world_size": 2,
    }
    split_up = [split(saved | {"hook_state": {"rank": rank}}, rank) for rank in range(2)]
    (shared, _), (_, part) = split_up
    assert problem_of_part(shared, part, 1) is None
    assert ranks_needed(shared, 1, 2) == [1] and ranks_needed(shared, 1, 3) == []
    assert merge(shared, [part], 1, 2)["hook_state"] == {"rank": 1}
    assert merge(shared, [None], 1, 2)["hook_state"] == {"rank": 0}
    assert merge(shared, [], 1, 3)["hook_state"] == {"rank": 0}
    assert split(saved | {"hook_state": None}, 0)[1] is None


def test_parts_of_two_runs_at_the_same_step_are_told_apart() -> None:
    """Without factors, as with int8, nothing but the number of the run tells them apart."""
    saved = payload_of(1)
    saved["parameters"]["weight"]["q"] = None
    shared, part = split(saved, 1, run=1)
    assert problem_of_part(check_shared(through_a_file(shared)), through_a_file(part), 1) is None
    _, other = split(saved, 1, run=2)
    assert "is of another save" in str(problem_of_part(shared, other, 1))
    assert "run" not in merge(shared, [part], 1, 2)


# ---- types

PLAIN: dict[str, Any] = {
    "scalars": ["a", 1, 10**30, 1.5, True, None, 1j, b"bytes"],
    "torch": [
        torch.ones(2),
        torch.nn.Parameter(torch.ones(2)),
        torch.float16,
        torch.device("cpu"),
        torch.Size([1]),
    ],
    "nested": {
        "a": {1: [torch.ones(1, dtype=torch.bfloat16), ("b", {2.5: set("c")})]},
        (1, "x"): {},
        None: [],
    },
    "ordered": collections.OrderedDict(a=[]),
}

PROBLEMS: dict[str, tuple[Any, str]] = {
    "path": ({"a": [1, PurePosixPath("x")]}, "['a'][1] is a pathlib.PurePosixPath"),
    "numpy scalar": ({"decay": np.float32(1)}, "['decay'] is a numpy.float32"),
    "a float by its class": (
        {"decay": {3: (0, np.float64(1))}},
        "['decay'][3][1] is a numpy.float64",
    ),
    "numpy array": ([np.zeros(2)], "[0] is a numpy.ndarray"),
    "defaultdict": ({"a": collections.defaultdict(int)}, "['a'] is a collections.defaultdict"),
    "deque": ({"a": collections.deque()}, "['a'] is a collections.deque"),
    "frozenset": (frozenset(), "the value itself is a builtins.frozenset"),
    "key": ({"a": {frozenset(): 1}}, "the key frozenset() of ['a'] is a builtins.frozenset"),
    "first of two": ({"a": range(3), "b": slice(1)}, "['a'] is a builtins.range"),
}


def _loads_with_weights_only(value: Any) -> bool:
    file = io.BytesIO()
    torch.save({"state": value}, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types_are_accepted_as_torch_accepts_them(name: str) -> None:
    assert plain_types_problem(PLAIN[name]) is None
    assert _loads_with_weights_only(PLAIN[name])


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_first_value_that_torch_would_reject_is_named(name: str) -> None:
    value, problem = PROBLEMS[name]
    assert plain_types_problem(value) == problem
    assert not _loads_with_weights_only(value)


def test_a_value_that_contains_itself_is_named() -> None:
    value: dict[str, Any] = {"a": []}
    value["a"].append(value)
    assert plain_types_problem(value) == "['a'][0] contains itself"
    shared = [1]
    assert plain_types_problem([shared, shared]) is None


# ---- writes that fail

LARGE = {"large": torch.arange(50_000.0)}


@contextlib.contextmanager
def files_up_to(size_bytes: int) -> Iterator[None]:
    """Context manager: a file of this process cannot grow beyond this size, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


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
    """If the save ends in between, the old shared file needs the part; the new one ignores it."""
    torch.save({"before": 1}, tmp_path / "part.pt")
    with mock.patch("os.replace", side_effect=OSError(5, "no")), pytest.raises(OSError):
        write_together([(tmp_path / "part.pt", None), (tmp_path / "shared.pt", {"small": 1})], 0)
    assert (tmp_path / "part.pt").exists()


def test_the_error_of_a_failed_write_names_the_file(tmp_path: Path) -> None:
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


def test_any_other_error_leaves_the_files_as_they_were(tmp_path: Path) -> None:
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


# ---- Accelerate


@launched
def _save_fails(folder: str, ranks: list[int]) -> dict[str, Any]:
    """Save after 4 steps; the save after 5 fails on `ranks`; the run goes on to step 6."""
    undisturbed = Training().train(6).weights()
    run = Training().train(4).save(folder)
    saved = residuals(run.hook)
    run.train(1)
    error = ""
    full = dist.get_rank() in ranks
    with files_up_to(20_000) if full else contextlib.nullcontext():
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


def test_a_full_disk_leaves_the_previous_checkpoint_whole(run_ranks: Any, tmp_path: Path) -> None:
    """Files that a killed save has left behind do no harm, either."""
    for name in (".comm_hook.pt.0.tmp", ".comm_hook_rank1.pt.1.tmp", ".comm_hook_1.pt.0.tmp"):
        (tmp_path / name).write_bytes(b"half")
    failed = run_ranks(_save_fails, str(tmp_path), [0, 1])
    resumed = run_ranks(_resume, str(tmp_path), 4)
    for rank in range(2):
        saved = failed[rank]["saved"]
        assert failed[rank]["error"].endswith(
            f"File too large: '{tmp_path}/comm_hook_rank{rank}.pt'"
        )
        assert failed[rank]["as if alone"]
        assert resumed[rank]["warnings"] == []
        assert saved and bits_equal(saved, resumed[rank]["loaded"])
    assert [path.name for path in tmp_path.glob(".*")] == [".comm_hook_1.pt.0.tmp"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_does_not_hold_up_the_others(
    run_ranks: Any, tmp_path: Path, rank: int
) -> None:
    failed = run_ranks(_save_fails, str(tmp_path), [rank])
    assert [bool(outcome["error"]) for outcome in failed] == [rank == 0, rank == 1]
    assert all(outcome["as if alone"] for outcome in failed)
    # The other rank has saved again, so the files are of two saves. The load notices it.
    first, second = run_ranks(_resume, str(tmp_path), 4 if rank == 0 else 5)
    assert torch.equal(first["weights"], second["weights"])
    assert any("all ranks start from residuals of zero" in text for text in first["warnings"])
    assert any("is of another save" in text for text in second["warnings"])


# ---- Lightning


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
    # As at the end of a process: connections close when nothing holds the group, as `comm_hook`
    # does.
    del t, options
    gc.collect()
    dist.destroy_process_group()
    return result


def test_a_full_disk_under_lightning_is_as_without_a_hook(run_ranks: Any, tmp_path: Path) -> None:
    results = {}
    for name, ours in (("ours", True), ("plain", False)):
        results[name] = run_ranks(_trainer_cannot_write, str(tmp_path / name), ours)
        step = support.STEPS_PER_EPOCH
        # Lightning writes to another place first: a checkpoint is there whole or not at all.
        assert [path.name for path in (tmp_path / name).glob("*")] == [f"step={step}.ckpt"]
        checkpoint = torch.load(tmp_path / name / f"step={step}.ckpt", weights_only=True)
        assert checkpoint["global_step"] == step
        assert (CHECKPOINT_KEY in checkpoint) == ours
    for ours, plain in zip(results["ours"], results["plain"], strict=True):
        assert ours["error"] == plain["error"]
        assert ours["step"] == plain["step"] == 2 * support.STEPS_PER_EPOCH
    for ranks in results.values():
        assert "File too large" in ranks[0]["text"]
