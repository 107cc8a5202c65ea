"""torch's CUDA sanitizer finds no access from two streams without an event between them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.repository import PYTHONPATH, REPOSITORY

LIMIT_S = 120


def _run(
    what: str, python: str = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [python, str(Path(__file__).with_name("sanitized_script.py")), what]
    environ = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.parametrize("hook", ["powerSGD", "same", "bf16"])
def test_the_script_itself_runs(hook: str) -> None:
    """Without a sanitizer and without a GPU."""
    done = _run(hook, warm.python(), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr


@pytest.mark.cuda
def test_a_planted_race_is_seen() -> None:
    done = _run("race", TORCH_CUDA_SANITIZER="1")
    assert done.returncode != 0 and "CUDASanitizerErrors" in done.stderr, done.stdout + done.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("hook", ["powerSGD", "same", "bf16"])
def test_no_race_is_seen(hook: str) -> None:
    done = _run(hook, TORCH_CUDA_SANITIZER="1")
    if done.returncode != 0 and _run("plain", TORCH_CUDA_SANITIZER="1").returncode != 0:
        pytest.skip("the sanitizer of this torch objects to DDP without a hook, too")
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-6000:]
