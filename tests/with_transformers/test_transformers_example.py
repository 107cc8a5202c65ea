"""The example with `CommHookTrainer`: killed and resumed, it ends bit-equal to an uninterrupted run."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import warm
from tests.support.features import trainer_resumes_on_cpu
from tests.support.repository import REPOSITORY

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

import clean_env  # noqa: E402

from commhooks.checkpoint.payload import save_id  # noqa: E402
from tests.support.transformers_runs import FILES  # noqa: E402

LAUNCH_LIMIT_S = 150
EXAMPLE = [str(REPOSITORY / "examples" / "transformers_trainer.py"), "--steps", "8", "--save-steps", "2"]


def _environ(home: Path) -> dict[str, str]:
    return clean_env.cleaned(os.environ, str(home)) | {"PYTHONPATH": str(REPOSITORY)}


def _two_ranks(folder: Path, store: dist.TCPStore, *first: str) -> list[subprocess.Popen[bytes]]:
    """What torchrun starts, without torchrun: killed, it would leave its processes behind for a while.

    Args:
        store: where they meet, as in that of torchrun; a new one for each start.
    """
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return [
        subprocess.Popen(
            [warm.python("transformers.trainer"), *first, *EXAMPLE, "--folder", str(folder)],
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
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", "2"]
    uninterrupted = subprocess.Popen([*torchrun, *EXAMPLE, "--folder", str(through)], env=_environ(tmp_path))
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    ranks = _two_ranks(killed, stores[0], str(Path(__file__).with_name("held_example.py")), "5")
    try:
        deadline = time.monotonic() + LAUNCH_LIMIT_S
        while not all(Path(f"{killed}_held_{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks)
            time.sleep(0.02)
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            assert rank.wait(LAUNCH_LIMIT_S) == -signal.SIGKILL
        assert not (killed / "checkpoint-6").exists()
        ranks = _two_ranks(killed, stores[1])
        assert [rank.wait(LAUNCH_LIMIT_S) for rank in ranks] == [0, 0]
        assert uninterrupted.wait(LAUNCH_LIMIT_S) == 0
    finally:
        for process in [*ranks, uninterrupted]:
            if process.poll() is None:
                process.terminate()  # torchrun ends its processes then
                process.wait()
    results = [json.loads((folder / "result.json").read_text()) for folder in (through, killed)]
    assert results[0]["test_loss"] == results[1]["test_loss"] < 5
    assert [each["stats"]["step"] for each in results] == [8, 8]
    assert results[1]["stats"]["compressed_steps"] == 4 < results[0]["stats"]["compressed_steps"]
    whole, resumed = (folder / "final" / "model.safetensors" for folder in (through, killed))
    assert whole.read_bytes() == resumed.read_bytes()
    for name in FILES:
        one, other = (torch.load(folder / "checkpoint-8" / name, weights_only=True) for folder in (through, killed))
        if "options" in one:  # the shared part: all that the ranks have in common, but the number of the run
            assert save_id({**one, "run": ""}) == save_id({**other, "run": ""})
        for key, residual in one.get("residuals", {}).items():
            assert torch.equal(residual, other["residuals"][key])
