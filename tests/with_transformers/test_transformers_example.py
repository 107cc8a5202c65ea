"""The example with `CommHookTrainer`: started again after its end was lost, it ends bit-equal."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support import warm
from tests.support.features import trainer_resumes_on_cpu
from tests.support.repository import REPOSITORY

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

import clean_env  # noqa: E402

from commhooks.checkpoint.parts import save_id  # noqa: E402
from tests.support.transformers_runs import FILES  # noqa: E402

LAUNCH_LIMIT_S = 150


def _train(folder: Path) -> None:
    """By the README's command."""
    python = warm.python("transformers.trainer")
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    example = [
        str(REPOSITORY / "examples" / "transformers_trainer.py"),
        "--steps",
        "4",
        "--save-steps",
        "2",
    ]
    env = clean_env.cleaned(os.environ, str(folder.parent)) | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run(
        [python, *torchrun, *example, "--folder", str(folder)],
        env=env,
        timeout=LAUNCH_LIMIT_S,
        check=True,
    )


@trainer_resumes_on_cpu
@pytest.mark.timeout(3 * LAUNCH_LIMIT_S)
def test_example_goes_on_bit_equal(tmp_path: Path) -> None:
    through, again = tmp_path / "through", tmp_path / "again"
    _train(through)
    # What a kill in the save of the last step leaves: its state file comes last.
    shutil.copytree(through, again, ignore=shutil.ignore_patterns("final", "result.json"))
    (again / "checkpoint-4" / "trainer_state.json").unlink()
    _train(again)
    results = [json.loads((folder / "result.json").read_text()) for folder in (through, again)]
    assert results[0]["test_loss"] == results[1]["test_loss"] < 5.545
    assert [result["stats"]["step"] for result in results] == [4, 4]
    assert results[1]["stats"]["compressed_steps"] == 2 < results[0]["stats"]["compressed_steps"]
    whole, resumed = (folder / "final" / "model.safetensors" for folder in (through, again))
    assert whole.read_bytes() == resumed.read_bytes()
    for name in FILES:
        one, other = (
            torch.load(folder / "checkpoint-4" / name, weights_only=True)
            for folder in (through, again)
        )
        # the shared part: all that the ranks have in common, but the number of the run
        if "options" in one:
            assert save_id({**one, "run": ""}) == save_id({**other, "run": ""})
        for key, residual in one.get("residuals", {}).items():
            assert torch.equal(residual, other["residuals"][key])
