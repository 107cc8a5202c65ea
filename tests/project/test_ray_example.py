"""`examples/ray_train.py`, as a user starts it: twice, so that the second run resumes. Skipped where Ray is not
installed, which `make venv` does not do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import clean_env
import pytest

from tests.support.repository import REPOSITORY

pytest.importorskip("ray.train")


def _run(folder: Path) -> dict[str, Any]:
    environment = clean_env.cleaned(os.environ, str(folder)) | {
        "PYTHONPATH": str(REPOSITORY),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(REPOSITORY / "examples/ray_train.py"), str(folder / "results")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.timeout(500)
def test_it_trains_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    assert _run(tmp_path) == {"epoch": 1, "hook_step": 8, "compressed": 4}
    assert _run(tmp_path) == {"epoch": 3, "hook_step": 16, "compressed": 8}  # counted since the resume
