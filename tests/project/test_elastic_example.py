"""`examples/elastic_training.py` under torchrun with `--nnodes 1:2`: one of two launchers is killed, and the other one
goes on alone, with the hook's state."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import clean_env
import pytest
import warm
from repository import REPOSITORY

SCRIPT = str(REPOSITORY / "examples/elastic_training.py")


def _launcher(port: int, folder: Path, log: str) -> subprocess.Popen[bytes]:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "run"]
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3"]
    script = ["--no-python", warm.python(), SCRIPT, str(folder / "state.pt")]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, *rendezvous, *script]
    environment = clean_env.cleaned(os.environ, str(folder)) | {
        "PYTHONPATH": str(REPOSITORY),
        "PAUSE_S": "0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / log).open("w") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    """As if its machine were lost: torchrun starts its ranks in sessions of their own."""
    ranks = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()
    for pid in [launcher.pid, *map(int, ranks)]:
        os.kill(pid, signal.SIGKILL)
    launcher.wait()


@pytest.mark.timeout(180)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pgrep")
def test_two_launchers_become_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first = _launcher(port, tmp_path, "first")
    time.sleep(2)  # so that this one has the store, and the other one can be lost
    second = _launcher(port, tmp_path, "second")
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "state.pt").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        _kill(second)
        assert first.wait(70) == 0, (tmp_path / "first").read_text()
    finally:
        for launcher in (first, second):
            if launcher.poll() is None:
                _kill(launcher)
    said = (tmp_path / "first").read_text()
    assert "of 2: begins at step 0, hook at 0" in said
    begun = [line for line in said.splitlines() if "rank 0 of 1: begins at step" in line]
    assert begun and begun[0].rpartition(" ")[2] not in ("0", "60")  # where the latest file was written by two ranks
    assert "rank 0 of 1: ends at step 60, hook at 60" in said
