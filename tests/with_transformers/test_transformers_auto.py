"""`auto` in the Trainer of transformers: it decides, and a checkpoint resumes with the decision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.features import trainer_resumes_on_cpu

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from tests.support.accelerators import launched  # noqa: E402
from tests.support.kinds import AUTO  # noqa: E402
from tests.support.transformers_runs import EPOCH, assert_equal, make_trainer, outcome  # noqa: E402


@launched
def _run(folder: str, resume: str | None = None, seed: int = 3) -> dict[str, Any]:
    trainer = make_trainer(folder, seed=seed, hook={"hook": AUTO})
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer) | {"notes": trainer.comm_hook.state_dict()["notes"]}


@trainer_resumes_on_cpu
def test_a_checkpoint_holds_the_decision(run_ranks: Any, tmp_path: Path) -> None:
    through = run_ranks(_run, str(tmp_path))
    resumed = run_ranks(_run, str(tmp_path / "resumed"), str(tmp_path / "checkpoint-4"), seed=99)
    for run, again in zip(through, resumed, strict=True):
        assert_equal(run, again)
        assert torch.equal(run["weights"], through[0]["weights"])
        assert run["notes"]["label"] == again["notes"]["label"] == "int8" and again["stats"]["step"] == EPOCH
