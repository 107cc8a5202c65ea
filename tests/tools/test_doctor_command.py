"""`commhooks doctor`, the command."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from commhooks import DoctorError
from commhooks.tools.cli import main
from commhooks.tools.doctor import command
from commhooks.tools.doctor.report import check_output
from tests.support import warm
from tests.support.ddp_steps import mlp, process_group_of_one
from tests.support.doctor_models import loss_of
from tests.support.repository import REPOSITORY


def test_what_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_output(None, None)
    check_output(tmp_path / "a.json", tmp_path / "a.png")
    with pytest.raises(DoctorError, match="there is no folder .*nowhere"):
        check_output(tmp_path / "nowhere" / "a.json", None)
    with pytest.raises(DoctorError, match="is a folder"):
        check_output(tmp_path, None)
    with pytest.raises(DoctorError, match="/proc/a.json cannot be written: "):
        check_output(Path("/proc/a.json"), None)
    with pytest.raises(DoctorError, match="no plot of the format 'xyz'; known are .*, png,"):
        check_output(None, tmp_path / "a.xyz")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept.json").write_text("kept")
    check_output(tmp_path / "kept.json", None)
    assert (tmp_path / "kept.json").read_text() == "kept"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["doctor", "a:b", "--plot", str(tmp_path / "a.png")]) == 1
    error = capsys.readouterr().err
    assert "the plot needs matplotlib " in error and error.endswith(": pip install matplotlib\n")


def test_only_rank_0_needs_the_folders_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, says in (("0", "there is no folder"), ("1", "no process group")):
        monkeypatch.setenv("RANK", rank)
        assert main(["doctor", "a:b", "--json", str(tmp_path / "nowhere" / "a.json")]) == 1
        assert says in capsys.readouterr().err


def frozen() -> Any:
    return mlp().requires_grad_(False), loss_of


@pytest.mark.parametrize(
    "build, sentence",
    [
        (lambda: mlp(), "build returned a Sequential; expected (model, batch_fn)"),
        (lambda: (loss_of, mlp()), "build returned (a function, ...); expected an nn.Module"),
        (lambda: (mlp(), None), "build returned (model, a NoneType); expected a function: batch_fn(model) makes"),
        (frozen, "the model has no parameter that requires a gradient"),
        (lambda: (nn.Sequential(), loss_of), "the model has no parameter that requires a gradient"),
    ],
)
def test_what_build_returns(build: Callable[[], Any], sentence: str) -> None:
    with process_group_of_one(), pytest.raises(DoctorError) as raised:
        command.build_model(build)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "path, sentence",
    [
        ("test_doctor_command.frozen", "expected 'package.module:function' with the full name of the module"),
        ("no_such_module:build", "cannot import 'no_such_module': No module named 'no_such_module'; start where"),
        ("train.py", "'train.py' is a Python file; write 'train.py:name', with the name of a function in it"),
        ("test_doctor_command:frozn", "'test_doctor_command' has no 'frozn' (did you mean 'frozen'?)"),
        ("test_doctor_command:REPOSITORY", "is a PosixPath; expected a function"),
    ],
)
def test_a_build_function_that_is_not_there(path: str, sentence: str) -> None:
    with pytest.raises(DoctorError) as raised:
        command.import_build(path)
    assert sentence in str(raised.value)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_takes_one_line_of_a_terminal() -> None:
    for stream, expected in (
        (io.StringIO(), "commhooks doctor: noop\ncommhooks doctor: bf16\n"),
        (_Terminal(), "\r\x1b[2Kcommhooks doctor: noop\r\x1b[2Kcommhooks doctor: bf16\r\x1b[2K"),
    ):
        progress = command.Progress(stream)
        progress("noop")
        progress("bf16")
        progress.end()
        assert stream.getvalue() == expected


def test_without_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "test_doctor_command:frozen"]) == 1
    assert "commhooks doctor: no process group" in capsys.readouterr().err
    with process_group_of_one():
        assert main(["doctor", "test_doctor_command:frozen"]) == 1
    assert "commhooks doctor: one rank only" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "batch_fn(model)" in capsys.readouterr().out


def test_under_torchrun(tmp_path: Path) -> None:
    """The example, started as its first lines say, on its way for some seconds."""
    torchrun = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    command = [warm.python("matplotlib.figure"), *torchrun.split(), "-m", "commhooks"]
    command += ["doctor", "examples.doctor_transformer:build", "--steps", "2", "--powersgd-ranks", "2"]
    command += ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=REPOSITORY, **streams, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"it did not end\n{output}\n{errors}")
    assert process.returncode == 0, errors
    assert output.count("powerSGD rank 2") >= 1 and output.count("2 ranks, gloo, 2.639 MB of gradients") == 1
    assert errors.count("commhooks doctor: round 1 of 2: noop") == 1
    assert "commhooks: powerSGD" not in errors  # that line is for trainings
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["advice"]["reason"] in " ".join(output.split())
    assert content["candidates"]["powerSGD rank 2"]["compressed_steps"] == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
