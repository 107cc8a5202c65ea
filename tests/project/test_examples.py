"""Examples that are started again go on where the first run ended, with the hook's state."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate_fsdp2  # of examples/
import clean_env
import pytest
import torch
from accelerate.state import AcceleratorState

from tests.support import warm
from tests.support.accelerators import launched
from tests.support.features import fully_shard_on_gloo
from tests.support.repository import REPOSITORY


def _run(
    folder: Path, python: str, script: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    environ = clean_env.cleaned(os.environ, str(folder))
    environ |= {"PYTHONPATH": str(REPOSITORY), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [python, str(REPOSITORY / "examples" / script), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_fabric_example_resumes(tmp_path: Path) -> None:
    first, second = (
        done.stdout + done.stderr
        for done in (
            _run(tmp_path, warm.python("lightning.pytorch"), "fabric_training.py", "--epochs=1")
            for _ in range(2)
        )
    )
    assert "epoch 0: loss" in first and "step 16, " in first
    assert "epoch 0: loss" not in second and "epoch 1: loss" in second and "step 32, " in second
    assert "resumed at step 16" in second


@pytest.mark.timeout(500)
def test_the_ray_example_resumes(tmp_path: Path) -> None:
    """Skipped where Ray is not installed, which `make venv` does not do."""
    pytest.importorskip("ray.train")
    (tmp_path / "results").mkdir()
    runs = (
        _run(tmp_path, sys.executable, "ray_train.py", str(tmp_path / "results")) for _ in range(2)
    )
    first, second = (json.loads(done.stdout.strip().splitlines()[-1]) for done in runs)
    assert first == {"epoch": 1, "hook_step": 8, "compressed": 4}
    assert second == {"epoch": 3, "hook_step": 16, "compressed": 8}  # counted since the resume


@launched
def _accelerate_fsdp2(folder: str) -> None:
    train, test = accelerate_fsdp2.digits()
    few = (
        torch.utils.data.Subset(train, range(len(train) // 4)),
        torch.utils.data.Subset(test, range(90)),
    )
    for epochs in ("1", "2"):
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
        arguments = ["accelerate_fsdp2.py", "--folder", folder, "--epochs", epochs]
        with (
            mock.patch.object(sys, "argv", arguments),
            mock.patch.object(accelerate_fsdp2, "digits", lambda: few),
        ):
            accelerate_fsdp2.main()


@fully_shard_on_gloo
def test_the_accelerate_fsdp2_example_resumes(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_accelerate_fsdp2, str(tmp_path), world_size=4)
    stats = json.loads((tmp_path / "result.json").read_text())["stats"]
    steps = 3  # of an epoch
    assert stats["backward_passes"] == steps and stats["step"] == 2 * steps
    assert stats["compressed_steps"] == steps and stats["compression_rate"] > 10
    assert [path.name for path in tmp_path.glob("epoch_*")] == ["epoch_2"]
    assert (tmp_path / "epoch_2" / "comm_hook" / ".metadata").is_file()
