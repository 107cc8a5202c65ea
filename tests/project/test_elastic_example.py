"""When one of two launchers is killed, the other one goes on alone with the hook's state."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import clean_env
import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support import warm
from tests.support.repository import REPOSITORY

SCRIPT = """
import os, pathlib, runpy, sys, time

example, folder = sys.argv[1], pathlib.Path(sys.argv[2]).parent
alone = os.environ["WORLD_SIZE"] == "1"
if not alone:
    (folder / "two").touch()
sleep, steps = time.sleep, 0


def pause(seconds):
    global steps
    sleep(seconds)
    if seconds != float(os.environ["PAUSE_S"]):
        return
    steps += 1
    while alone and not (folder / "two").exists() or (
        not alone and steps == 25 and not (folder / "killed").exists()
    ):
        sleep(0.01)


time.sleep = pause
del sys.argv[0]
runpy.run_path(example, run_name="__main__")
"""
"""The example, which waits after a step for the second launcher to come, and later to be killed."""


def _launcher(port: int, folder: Path, log: str) -> subprocess.Popen[bytes]:
    """The rendezvous's store is the test's, so that each launcher can be lost."""
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-id",
        "run",
    ]
    rendezvous += ["--local-addr", "127.0.0.1"]
    rendezvous += ["--rdzv-conf", "is_host=false,last_call_timeout=3,keep_alive_interval=2"]
    elastic = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    torchrun = [warm.python(), "-m", "torch.distributed.run"]
    example = REPOSITORY / "examples/elastic_training.py"
    script = [str(folder / "script.py"), str(example), str(folder / "state.pt")]
    command = [*torchrun, *elastic, *rendezvous, *script]
    environment = clean_env.cleaned(os.environ, str(folder)) | {
        "PYTHONPATH": str(REPOSITORY),
        "PAUSE_S": "0.03125",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / log).open("w") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    """Kill torchrun and its ranks, as if their machine were lost."""
    for process in [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children()]:
        process.kill()
    launcher.wait()


def _wait_for(is_true: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 150
    while not is_true() and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_two_launchers_become_one(tmp_path: Path) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    log, saved = tmp_path / "first", tmp_path / "state.pt"
    (tmp_path / "script.py").write_text(SCRIPT)

    def has_saved_together() -> bool:
        _, of_two, after = log.read_text().rpartition(" of 2: begins at step ")
        began = int(after.partition(",")[0]) if of_two and "," in after else None
        return began is not None and saved.exists() and torch.load(saved)["step"] > began

    first, second = (_launcher(store.port, tmp_path, name) for name in ("first", "second"))
    try:
        _wait_for(has_saved_together, first)
        _kill(second)
        (tmp_path / "killed").touch()
        assert first.wait(150) == 0, log.read_text()
    finally:
        for launcher in (first, second):
            if launcher.poll() is None:
                _kill(launcher)
    _, of_two, after = log.read_text().rpartition(" of 2: begins at step ")
    assert of_two, log.read_text()
    began_together = int(after.partition(",")[0])
    alone = [line for line in after.splitlines() if line.startswith("rank 0 of 1: begins")]
    # Where the latest file was written by two ranks.
    expected = [
        f"rank 0 of 1: begins at step {step}, hook at {step}"
        for step in range(began_together + 10, 60, 10)
    ]
    assert alone and alone[0] in expected, log.read_text()
    assert "rank 0 of 1: ends at step 60, hook at 60" in after
