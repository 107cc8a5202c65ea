"""`examples/fabric_training.py`, as a user starts it: twice, so that the second run resumes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.repository import REPOSITORY

pytest.importorskip("lightning")


def _run(folder: Path) -> str:
    clean, script = str(REPOSITORY / "examples/clean_env.py"), str(REPOSITORY / "examples/fabric_training.py")
    options = ["--epochs=2", "--checkpoint", str(folder / "state.ckpt")]
    command = [warm.python("lightning.pytorch"), clean, script, *options]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    first, second = _run(tmp_path), _run(tmp_path)
    assert "epoch 0: loss" in first and "step 32, " in first
    assert "epoch 0: loss" not in second and "epoch 3: loss" in second and "step 64, " in second
    assert "resumed at step 32" in second
