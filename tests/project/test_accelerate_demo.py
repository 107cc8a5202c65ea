"""`make demo-accelerate`: what it calls a failure, and the whole of it once in short form."""

import os
import subprocess
from pathlib import Path
from typing import Any

import accelerate_digits
import pytest
from accelerate_demo import failures

from tests.support import warm
from tests.support.repository import REPOSITORY

WHOLE: dict[str, Any] = {"global_step": 345, "stats": {"compressed_steps": 325, "backward_passes": 345}}
RESUMED: dict[str, Any] = {"global_step": 345, "stats": {"compressed_steps": 184, "backward_passes": 184}}


def test_each_broken_promise_is_a_failure() -> None:
    """Those after a kill are in `test_demo.py`."""
    plain = RESUMED | {"stats": RESUMED["stats"] | {"compressed_steps": 0}}
    sentence = "the resumed training: no step was compressed"
    assert failures(WHOLE, plain, saved_steps=161, differ=[]) == [sentence]
    assert failures(WHOLE, RESUMED, saved_steps=161, differ=["w"]) == ["the weights differ after the kill: w"]


class Killed(Exception):
    pass


class FakeAccelerator:
    """Of the main process; `save_state` or the renaming after it is as far as the process gets."""

    is_main_process = True

    def __init__(self, killed_while_saving: bool) -> None:
        self.killed_while_saving = killed_while_saving

    def wait_for_everyone(self) -> None: ...

    def save_state(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").touch()
        if self.killed_while_saving:
            raise Killed
        (Path(folder) / "optimizer.bin").touch()


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    accelerate_digits.save(FakeAccelerator(False), tmp_path, 1)
    with pytest.raises(Killed):
        accelerate_digits.save(FakeAccelerator(True), tmp_path, 2)
    assert accelerate_digits.newest_checkpoint(tmp_path) == tmp_path / "epoch_1"
    accelerate_digits.save(FakeAccelerator(False), tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_2"]
    assert sorted(path.name for path in (tmp_path / "epoch_2").iterdir()) == ["model.safetensors", "optimizer.bin"]


@pytest.mark.timeout(300)
def test_short_demo(tmp_path: Path) -> None:
    """Two epochs of 23 steps, of which the first 20 are not compressed; killed in the second epoch."""
    command = [warm.python("accelerate"), "examples/clean_env.py", "examples/accelerate_demo.py", "--epochs=2"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path), "ACCELERATE_USE_CPU": "maybe"}
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=270)
    except BaseException:
        process.terminate()  # the demo ends its trainings then
        process.communicate()
        raise
    assert process.returncode == 0, output
    assert "in 26 compressed steps of 46" in output
    assert "in epoch 2." in output
    assert "It trained the last 23 of 46 steps." in output
    assert "bit-equal to those of the uninterrupted run: yes" in output
    assert [path.name for path in tmp_path.glob("commhooks-*")] == []
