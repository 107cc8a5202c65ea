"""The example with `CommHookTrainer` in processes of its own: killed and resumed, it ends as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from features import trainer_resumes_on_cpu
from repository import REPOSITORY

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

import clean_env  # noqa: E402
import warm  # noqa: E402
from transformers_runs import FILES  # noqa: E402

from commhooks.checkpoint.parts import save_id  # noqa: E402

LAUNCH_LIMIT_S = 150
EXAMPLE = [str(REPOSITORY / "examples" / "transformers_trainer.py"), "--steps", "16", "--save-steps", "4"]


def _environ(home: Path) -> dict[str, str]:
    return clean_env.cleaned(os.environ, str(home)) | {"PYTHONPATH": str(REPOSITORY)}


def _two_ranks(folder: Path) -> list[subprocess.Popen[bytes]]:
    """What torchrun starts, without torchrun: killed, it would leave its processes behind for a while."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [warm.python("transformers.trainer"), *EXAMPLE, "--folder", str(folder)],
            env=_environ(folder.parent) | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


@trainer_resumes_on_cpu
@pytest.mark.timeout(3 * LAUNCH_LIMIT_S)
def test_example_goes_on_bit_equal_after_a_kill(tmp_path: Path) -> None:
    """From the README's command; what is killed and started again is compared with what was not."""
    through, killed = tmp_path / "through", tmp_path / "killed"
    python = warm.python("transformers.trainer")
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    uninterrupted = subprocess.Popen([*torchrun, *EXAMPLE, "--folder", str(through)], env=_environ(tmp_path))
    ranks = _two_ranks(killed)
    try:
        deadline = time.monotonic() + LAUNCH_LIMIT_S
        while not (killed / "checkpoint-8" / "trainer_state.json").exists():
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
            time.sleep(0.02)
        time.sleep(0.1)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            assert rank.wait(LAUNCH_LIMIT_S) == -signal.SIGKILL
        assert not (killed / "checkpoint-16").exists()
        ranks = _two_ranks(killed)
        assert [rank.wait(LAUNCH_LIMIT_S) for rank in ranks] == [0, 0]
        assert uninterrupted.wait(LAUNCH_LIMIT_S) == 0
    finally:
        for process in [*ranks, uninterrupted]:
            if process.poll() is None:
                process.terminate()  # torchrun ends its processes then
                process.wait()
    results = [json.loads((folder / "result.json").read_text()) for folder in (through, killed)]
    assert results[0]["test_loss"] == results[1]["test_loss"] < 5
    assert [each["stats"]["step"] for each in results] == [16, 16]
    assert 4 <= results[1]["stats"]["compressed_steps"] <= 8 < results[0]["stats"]["compressed_steps"]
    for name in ("final/model.safetensors",):
        assert (through / name).read_bytes() == (killed / name).read_bytes()
    for name in FILES:
        one, other = (torch.load(folder / "checkpoint-16" / name, weights_only=True) for folder in (through, killed))
        if "options" in one:  # the shared part: all that the ranks have in common, but the number of the run
            assert save_id({**one, "run": ""}) == save_id({**other, "run": ""})
        for key, residual in one.get("residuals", {}).items():
            assert torch.equal(residual, other["residuals"][key])
