"""`auto` in Accelerate: it decides, `save_state` keeps the decision, and its YAML configures it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.requested import checked_request
from commhooks import Auto
from tests.support.accelerators import Training, launched
from tests.support.kinds import AUTO


@launched
def _save_and_resume(folder: str) -> dict[str, Any]:
    def handler() -> CommHookKwargs:
        return CommHookKwargs(hook=AUTO, bucket_cap_mb=0.001)

    run = Training(handler()).train(6).save(folder)
    run.train(3)
    again = Training.resumed(folder, 6, handler()).train(3)
    return {
        "weights": [run.weights(), again.weights()],
        "chosen": [each.hook.stats()["chosen"] for each in (run, again)],
        "notes": [each.hook.state_dict()["notes"] for each in (run, again)],
        "compressed": again.hook.stats()["compressed_steps"],
    }


def test_save_state_keeps_the_decision(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_save_and_resume, str(tmp_path)):
        assert torch.equal(*rank["weights"]) and rank["chosen"] == ["int8", "int8"]
        assert rank["notes"][0] == rank["notes"][1] and rank["compressed"] == 3


def test_the_yaml(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    options = "{quality: close, target: 0.5, exclude: ['*e*']}"
    path.write_text(f"comm_hook_config:\n  hook: auto\n  hook_options: {options}\n")
    made = checked_request(CommHookKwargs.from_config(path))
    assert made.config == Auto(quality="close", target=0.5, exclude=["*e*"])
