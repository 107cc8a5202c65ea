"""Resumed in new processes, started as users start them, a run ends bit for bit as the one that was not interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from accelerate_script import ACCUMULATED, SAVE_AT, START, STEPS
from repository import PYTHONPATH, SUPPORT

LIMIT_S = 280


def launch(*arguments: str) -> None:
    """`accelerate launch` of the script on two CPU ranks."""
    command = [warm.python("accelerate"), "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    # Port 0: a free one. `--multi_gpu` starts the processes; with `--cpu` Accelerate 1.15 would start one only.
    command += ["--main_process_port", "0", "--mixed_precision", "no", "--num_machines", "1", "--dynamo_backend", "no"]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": PYTHONPATH}
    process = subprocess.Popen(
        [*command, str(SUPPORT / "accelerate_script.py"), *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher and its workers
        output, _ = process.communicate()
        pytest.fail(f"{arguments} did not end within {LIMIT_S} s\n{output}")
    assert process.returncode == 0, output


@pytest.mark.timeout(2 * LIMIT_S + 20)
def test_resume_in_new_processes(tmp_path: Path) -> None:
    launch(str(tmp_path), "through")
    launch(str(tmp_path), "resume")
    ranks = [[torch.load(tmp_path / f"{name}{rank}.pt") for name in ("through", "resume")] for rank in range(2)]
    for through, resumed in ranks:
        for name in ("control", "hook"):
            for step in SAVE_AT:
                assert len(resumed[name, step]["losses"]) == (STEPS - step) * ACCUMULATED
                assert_same_end(through[name], resumed[name, step])
        whole = through["hook"]
        assert whole["stats"]["compressed_steps"] == STEPS - START
        assert whole["stats"]["collectives_last_pass"] >= 6  # several buckets
        assert whole["residuals"].keys() and all(r.norm() > 0 for r in whole["residuals"].values())
        for step in SAVE_AT:
            stats = resumed["hook", step]["stats"]
            assert stats["step"] == STEPS and stats["compressed_steps"] == STEPS - max(step, START)
        # Without our files it ends elsewhere; and so does a run without a hook.
        for other in (resumed["stripped", SAVE_AT[-1]], through["control"]):
            assert (other["weights"] - whole["weights"]).abs().max() > 1e-4
        for name in ("hook", "control"):
            assert torch.equal(through[name]["weights"], ranks[0][0][name]["weights"])
    assert ranks[0][0]["hook"]["losses"] != ranks[1][0]["hook"]["losses"]  # each rank has data of its own


def assert_same_end(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    assert torch.equal(whole["weights"], resumed["weights"])
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    assert whole["learning_rate"] == resumed["learning_rate"]
    assert (whole["residuals"] is None) == (resumed["residuals"] is None)
    if whole["residuals"] is not None:
        assert whole["residuals"].keys() == resumed["residuals"].keys()
        assert all(torch.equal(whole["residuals"][name], resumed["residuals"][name]) for name in whole["residuals"])
