"""`commhooks doctor`, the command."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn

from commhooks import DoctorError
from commhooks.tools.cli import main
from commhooks.tools.doctor import command
from tests.support import warm
from tests.support.ddp_steps import mlp, process_group_of_one
from tests.support.doctor_models import loss_of
from tests.support.repository import REPOSITORY


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
        command.wrapped(build())
    assert sentence in str(raised.value)


def test_a_build_function_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with process_group_of_one(), mock.patch.object(command, "check_world_size"):
        assert main(["doctor", "test_doctor_command:frozn"]) == 1
    says = "'test_doctor_command' has no 'frozn' (did you mean 'frozen'?)"
    assert capsys.readouterr().err == f"commhooks doctor: 'test_doctor_command:frozn': {says}\n"


def test_without_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "test_doctor_command:frozen"]) == 1
    assert "commhooks doctor: no process group" in capsys.readouterr().err
    with process_group_of_one():
        assert main(["doctor", "test_doctor_command:frozen"]) == 1
    assert "commhooks doctor: one rank only" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "batch_fn(model)" in capsys.readouterr().out


def test_under_torchrun() -> None:
    """The example, started as its first lines say, on its way for some seconds."""
    torchrun = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    command = [warm.python(), *torchrun.split(), "-m", "commhooks"]
    command += ["doctor", "examples.doctor_transformer:build", "--steps", "2", "--powersgd-ranks", "2"]
    command += ["--json"]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=REPOSITORY, **streams, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=280)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"it did not end\n{output}\n{errors}")
    assert process.returncode == 0, errors
    assert errors.count("commhooks doctor: round 1 of 2: noop") == 1
    assert "commhooks: powerSGD" not in errors  # that line is for trainings
    content = json.loads(output)
    assert content["world_size"] == 2 and content["gradient_bytes"] == pytest.approx(2_639_000, abs=1000)
    assert content["candidates"]["powerSGD rank 2"]["error"] > content["candidates"]["int8"]["error"] > 0
