"""`commhooks inspect`: what is in a saved state, told from the file alone; nothing in it runs, and damage is named."""

import copy
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from commhooks import PayloadError
from commhooks.checkpoint.checks import check_header, check_learned
from commhooks.tools.cli import main
from commhooks.tools.inspect.command import report_text
from commhooks.tools.inspect.payload import _inspect, inspect_path
from commhooks.tools.named_model import UnreadableFileError
from tests.support import accelerators, golden_runs, hostile
from tests.support import lightning_support as support


def golden(kind: str, rank: int = 0) -> Path:
    return golden_runs.path(kind, rank, 1)


def read(kind: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(golden(kind, rank), weights_only=True)


def norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum().sqrt())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As Accelerate's `save_state` leaves it, and the Trainer."""
    shutil.copy(golden("shared"), tmp_path / "comm_hook.pt")
    for rank in range(2):
        shutil.copy(golden("part", rank), tmp_path / f"comm_hook_rank{rank}.pt")
    torch.save({"step": 4}, tmp_path / "random_states_0.pkl")
    return tmp_path


def as_json(capsys: Any, *arguments: object, status: int = 0) -> list[dict[str, Any]]:
    assert main(["inspect", *map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)["payloads"]


# ------------------------------------------------------------------------------------------------------ what is there


@pytest.mark.parametrize("kind", [kind for kind in golden_runs.KINDS if kind not in ("shared", "part")])
def test_every_kind_of_payload(kind: str, capsys: Any) -> None:
    (report,), saved = as_json(capsys, golden(kind)), read(kind)
    assert report["problems"] == [] and report["where"] == str(golden(kind))
    header = ("hook", "options", "step", "world_size", "nonfinite_steps", "loss_scale", "exact", "residual")
    for key in header:
        assert report.get(key) == saved.get(key), key
    assert report["hook_state"] == ("a dict with 7 entries" if kind == "users" else None)
    assert [each["name"] for each in report.get("parameters", [])] == list(saved.get("parameters", {}))
    total = 0
    for each in report.get("parameters", []):
        entry = saved["parameters"][each["name"]]
        residual, q = entry["residual"], entry["q"]
        assert each["shape"] == entry["shape"] and each["q"] == (None if q is None else list(q.shape))
        assert each["rank"] == (None if q is None else 2)
        if isinstance(residual, list):
            expected = {str(r): norm(t) for r, t in zip(saved["residual_ranks"], residual, strict=True)}
            assert each["residual_norm_per_rank"] == pytest.approx(expected) and each["residual_norm"] is None
        else:
            assert each["residual_norm_per_rank"] is None
            assert each["residual_norm"] == (None if residual is None else pytest.approx(norm(residual)))
        copies = residual if isinstance(residual, list) else [] if residual is None else [residual]
        size = sum(4 * t.numel() for t in (*copies, *([] if q is None else [q])))
        assert each["size_bytes"] == size
        total += size
    assert [each["name"] for each in report.get("batched_q", [])] == list(saved.get("batched_q", {}))
    text = report_text(report)
    assert "MB" not in text
    if kind == "mean":
        assert report["size_bytes"] == total > 0 and f"size        {total / 1000:.3f} kB" in text
    assert f"hook        {saved['hook']}" in text and "step        4" in text
    assert {"inexact": "not all ranks took part in saving", "drop": "not saved", "mean": "the mean over 2 ranks",
            "gathered": "of each of 2 ranks", "per_rank": "of rank 0 only"}.get(kind, "") in text  # fmt: skip


def test_norms_are_told_without_the_loss_scale() -> None:
    scaled = copy.deepcopy(read("mean"))
    scaled["loss_scale"] = 1024.0
    (before,), (after,) = ([r for r in _inspect(Path("x"), (), each)["parameters"] if r["name"] == "conv"]
                           for each in (read("mean"), scaled))  # fmt: skip
    assert after["residual_norm"] == pytest.approx(before["residual_norm"] / 1024)


def test_p_is_shown_where_p_and_q_alternate() -> None:
    saved = read("mean")
    entry = saved["parameters"]["wide"]
    entry["q"], entry["p"] = None, torch.randn(2, 8)
    report = _inspect(Path("x"), (), saved)
    (wide,) = (each for each in report["parameters"] if each["name"] == "wide")
    assert (wide["q"], wide["p"], wide["rank"]) == (None, [2, 8], 2) and "2x8" in report_text(report)


def test_a_folder(folder: Path, capsys: Any) -> None:
    (report,) = as_json(capsys, folder)
    assert report["where"] == str(folder / "comm_hook.pt") and report["residual_ranks"] == [0, 1]
    for each in report["parameters"]:
        expected = {
            str(rank): norm(part["residuals"][each["name"]])
            for rank in range(2)
            if each["name"] in (part := read("part", rank))["residuals"]
        }
        assert (each["residual_norm_per_rank"] or {}) == pytest.approx(expected)
    assert any(each["residual_norm_per_rank"] for each in report["parameters"])
    assert as_json(capsys, folder / "comm_hook.pt") == [report]
    shutil.copy(golden("simple"), folder / "comm_hook_1.pt")  # of a second model, without a fingerprint
    assert [each["hook"] for each in as_json(capsys, folder)] == ["powerSGD", "fp16_compress"]


def test_a_payload_inside_another_checkpoint(tmp_path: Path, capsys: Any) -> None:
    inner = read("mean")
    torch.save({"model": {"w": torch.ones(2)}, "more": {"hook": inner}, "again": inner}, tmp_path / "mine.pt")
    (report,) = as_json(capsys, tmp_path / "mine.pt")  # the same object is told once
    assert report["where"] == f"{tmp_path / 'mine.pt'}['again']" and report["hook"] == "powerSGD"
    torch.save({"a": {"hook": inner}, "b": {"hook": read("simple")}}, tmp_path / "two.pt")
    assert [each["hook"] for each in as_json(capsys, tmp_path / "two.pt")] == ["powerSGD", "fp16_compress"]


def test_what_a_stranger_named_cannot_steer_the_terminal(capsys: Any) -> None:
    saved = read("mean")
    saved["parameters"]["\x1b[31mred"] = saved["parameters"].pop("wide")
    saved["options"]["\x1b]0;title"] = "\x1b[2J"
    saved["hook"] = "\ud800"
    text = report_text(_inspect(Path("x"), (), saved))
    assert "\x1b" not in text and r"\x1b[31mred" in text
    text.encode()


# ---------------------------------------------------------------------------------------------- from real trainings


def _lightning(root: str) -> None:
    callback = ModelCheckpoint(dirpath=root, filename="last", save_last=False, every_n_train_steps=4)
    trainer = support.trainer(root, max_steps=4, callbacks=[callback])
    trainer.fit(support.Model(), support.data())


@accelerators.launched
def _accelerate(root: str) -> float:
    training = accelerators.Training().train(5).save(root)
    saved = training.hook.state_dict("per_rank")["parameters"]
    return norm(saved["3.weight"]["residual"][0])


def _both(lightning_root: str, accelerate_root: str) -> float:
    _lightning(lightning_root)
    return _accelerate(accelerate_root)


def test_checkpoints_of_lightning_and_accelerate(run_ranks: Any, tmp_path: Path, capsys: Any) -> None:
    norms = run_ranks(_both, str(tmp_path / "pl"), str(tmp_path / "accelerate"))
    (report,) = as_json(capsys, tmp_path / "pl" / "last.ckpt")
    assert report["where"].endswith("last.ckpt['commhooks']") and (report["step"], report["world_size"]) == (4, 2)
    assert report["residual"] == "mean" and report["exact"] is True
    compressed = [each for each in report["parameters"] if each["rank"] is not None]
    assert {each["name"] for each in compressed} == {"net.0.weight", "net.2.weight", "net.4.weight"}
    assert all(each["residual_norm"] > 0 for each in compressed)
    (report,) = as_json(capsys, tmp_path / "accelerate")
    assert (report["step"], report["options"]["exclude"]) == (5, [])
    (third,) = (each for each in report["parameters"] if each["name"] == "3.weight")
    assert third["residual_norm_per_rank"] == pytest.approx({str(rank): x for rank, x in enumerate(norms)})
    assert main(["inspect", str(tmp_path / "pl")]) == 1
    assert f"give one of {tmp_path / 'pl' / 'last.ckpt'}" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- damage and malice


class Evil:
    """What a file runs that `pickle.load` reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: Any) -> None:
    evil, ran = tmp_path / "evil.pt", tmp_path / "ran"
    torch.save({"commhooks": Evil(ran)}, evil)
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps({"commhooks": Evil(ran)}, protocol=2))
    torch.save({"commhooks": Evil(ran)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(evil, folder / "comm_hook.pt")
    for path in (evil, tmp_path / "evil.pkl", tmp_path / "old.pt", folder):
        assert main(["inspect", str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "posix.mkdir" in err and "nothing in it was executed" in err
    with pytest.raises(FileExistsError):  # the test would see it
        ran.mkdir()
        torch.load(evil, weights_only=False)


@pytest.mark.parametrize(
    "content, text",
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "cannot be read: it is empty"),
        (b"import torch\n", "is not a file of torch.save, or damaged"),
        (b"PK\x03\x04" + bytes(200), "cannot be read: it is cut off after 204 bytes"),
    ],
)
def test_files_that_are_none(tmp_path: Path, capsys: Any, content: bytes | None, text: str) -> None:
    path = tmp_path / "some.pt"
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 1
    err = capsys.readouterr().err
    assert f"commhooks inspect: {path} {text}" in err and err.count("\n") == 1


@pytest.mark.parametrize("error", [None, OSError(22, "Invalid argument")])
@pytest.mark.parametrize("missing", [1 / 2, 100])
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_checkpoint_that_is_cut_off(
    tmp_path: Path, capsys: Any, monkeypatch: Any, command: str, missing: float, error: OSError | None
) -> None:
    path = tmp_path / "cut.pt"
    torch.save({"state_dict": {"w": torch.ones(256, 256)}}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: -int(missing if missing > 1 else missing * len(whole))])
    if error is not None:
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: _raise(error))
    assert main([command, str(path)]) == 1
    err = capsys.readouterr().err
    assert f"commhooks {command}: {path} cannot be read: it is cut off after {path.stat().st_size} bytes" in err
    assert err.count("\n") == 1


def _raise(error: Exception) -> None:
    raise error


def test_files_and_folders_without_a_state(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(1)}, "epoch": 1}, tmp_path / "plain.pt")
    with pytest.raises(UnreadableFileError, match="no state of a communication hook, only 'state_dict', 'epoch'"):
        inspect_path(tmp_path / "plain.pt")
    with pytest.raises(UnreadableFileError, match="has no comm_hook"):
        inspect_path(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    shutil.copy(golden("shared"), tmp_path / "checkpoint-5" / "comm_hook.pt")
    with pytest.raises(UnreadableFileError, match="give one of .*checkpoint-5"):
        inspect_path(tmp_path)


def test_damage_is_named(folder: Path, capsys: Any) -> None:
    saved = read("mean")
    saved["parameters"]["conv"]["residual"][0, 0] = float("nan")
    saved["hook"] = "powerSGD"
    path = folder / "damaged.pt"
    torch.save({"good": read("simple"), "hook": saved}, path)
    assert main(["inspect", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "fp16_compress" in out  # what is whole is shown
    assert f"{path}['hook']: damaged hook state: parameters['conv']['residual'] holds inf or NaN" in err
    newer = read("mean") | {"version": 2}
    torch.save(newer, path)
    (report,) = as_json(capsys, path, status=1)
    assert "saved by a newer commhooks" in report["problems"][0]


def test_parts_that_are_missing_or_of_another_save(folder: Path, capsys: Any) -> None:
    part = read("part", 1)
    torch.save(part | {"fingerprint": "0"}, folder / "comm_hook_rank1.pt")
    (report,) = as_json(capsys, folder, status=1)
    assert "comm_hook_rank1.pt is of another save than the shared file" in report["problems"][0]
    assert "has no usable part of rank 1: a run that resumes" in report["problems"][1]
    assert report["residual_ranks"] == [0]
    (folder / "comm_hook_rank1.pt").unlink()
    (report,) = as_json(capsys, folder, status=1)
    assert len(report["problems"]) == 1 and "no usable part of rank 1" in report["problems"][0]
    with pytest.raises(UnreadableFileError, match="is the part of rank 0; give the shared file"):
        inspect_path(folder / "comm_hook_rank0.pt")
    (folder / "comm_hook.pt").unlink()
    (report,) = as_json(capsys, folder, status=1)
    assert "comm_hook.pt is missing, which the main process writes" in report["problems"][0]
    (report,) = as_json(capsys, folder / "comm_hook_rank0.pt", status=1)
    assert "the part of rank 0 alone" in report["problems"][0]


def test_whatever_is_in_it() -> None:
    """A report is made of everything, without an error, that JSON and a terminal take; what loading refuses is told."""
    payloads = [read(kind) for kind in ("mean", "gathered", "batched", "shared", "simple")]
    refused = 0
    for seed in range(400):
        rng = random.Random(seed)
        payload, what = hostile.changed(rng.choice(payloads), rng.choice(payloads), rng)
        report = _inspect(Path("x"), (), payload)
        json.dumps(report, allow_nan=False)
        if "hook" in report:
            report_text(report).encode()
        try:
            check_header(payload)
            if "parameters" in payload:
                check_learned(payload)
        except PayloadError:
            refused += 1
            assert report["problems"] and "hook" not in report, what
    assert 100 < refused < 380


def test_damaged_files(tmp_path: Path) -> None:
    content, path = golden("gathered").read_bytes(), tmp_path / "damaged.pt"
    unreadable = 0
    for seed in range(80):
        path.write_bytes(hostile.damaged_bytes(content, random.Random(seed))[0])
        try:
            json.dumps(inspect_path(path), allow_nan=False)
        except UnreadableFileError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            unreadable += 1
    assert unreadable > 20
