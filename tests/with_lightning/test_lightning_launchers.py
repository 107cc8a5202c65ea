"""Lightning's own launchers, each really used: a script with two processes."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.repository import REPOSITORY

SCRIPT = Path(__file__).with_name("lightning_script.py")
TIMEOUT_S = 180


def _launch(start_method: str, folder: Path) -> list[dict[str, Any]]:
    """What the two ranks reported. The environment is that of the test, which the fixtures have
    cleaned.
    """
    folder.mkdir()
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [warm.python("lightning.pytorch"), str(SCRIPT), start_method, str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a group of its own, so that its children can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the {start_method} launcher did not end within {TIMEOUT_S} s:\n{output}")
    assert process.returncode == 0, output
    assert "2 of 4 parameters compressed" in output
    reports = sorted(folder.glob("rank-*.json"))
    assert [report.name for report in reports] == ["rank-0.json", "rank-1.json"], output
    ranks = [json.loads(report.read_text()) for report in reports]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["pid"] != ranks[1]["pid"]
    for rank in ranks:
        assert rank["world_size"] == 2
        assert rank["stats"]["step"] == 8
        assert rank["stats"]["collectives_last_pass"] == 4  # two buckets
    return ranks


@pytest.mark.timeout(3 * TIMEOUT_S)
def test_hooks_train_with_popen_spawn_and_fork(tmp_path: Path) -> None:
    results = {method: _launch(method, tmp_path / method) for method in ("popen", "spawn", "fork")}
    for ranks in results.values():
        assert [rank["stats"]["compressed_steps"] for rank in ranks] == [6, 6]
        assert ranks[0]["weights"] == results["popen"][0]["weights"]  # the launcher does not matter
