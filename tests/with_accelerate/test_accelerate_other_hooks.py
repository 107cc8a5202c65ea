"""`save_state` with hooks that remember other things than PowerSGD, or nothing: a resume from it is bit-equal."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerate_checkpoints import BOTH
from tests.support.accelerators import Training, hook_files, launched
from tests.support.kinds import AUTO


@launched
def _resumed(folder: str, step: int, **handler: Any) -> dict[str, Any]:
    run = Training(CommHookKwargs(**handler)).train(step)
    before = run.weights()
    run.save(folder)
    saved, notes = run.weights(), run.hook.state_dict().get("notes")
    again = Training.resumed(folder, step, CommHookKwargs(**handler))
    return {
        "before": [before],
        "saved": saved,
        "loaded": again.weights(),
        "notes": [notes, again.hook.state_dict().get("notes")],
        "end": [each.train(5).weights() for each in (run, again)],
        "stats": again.hook.stats(),
    }


def test_auto_keeps_its_decision(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_resumed, str(tmp_path), 6, hook=AUTO, bucket_cap_mb=0.001):
        assert torch.equal(*rank["end"]) and rank["stats"]["chosen"] == "int8"
        assert rank["notes"][0] == rank["notes"][1] is not None and rank["stats"]["compressed_steps"] == 5


def test_in_mid_round_the_common_weights_are_saved(run_ranks: Any, tmp_path: Path) -> None:
    options = {"sync_every": 3, "outer_momentum": 0.3}
    ranks = run_ranks(_resumed, str(tmp_path), 4, hook="diloco", hook_options=options)
    for rank in ranks:
        assert torch.equal(rank["saved"], ranks[0]["saved"]) and torch.equal(rank["saved"], rank["loaded"])
        assert torch.equal(*rank["end"])
    for when in ("before", "end"):  # in mid-round
        assert not torch.equal(ranks[0][when][0], ranks[1][when][0])


def test_a_simple_hook_is_saved_too(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_resumed, str(tmp_path), 2, hook="fp16_compress"):
        assert rank["stats"]["compression_rate"] == 2 and torch.equal(*rank["end"])
    assert hook_files(tmp_path) == BOTH[:1]


@launched
def _save_model(folder: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    run = Training(CommHookKwargs(hook="local_sgd", hook_options={"sync_every": 3})).train(4)
    run.accelerator.save_model(run.model, folder)
    return run.weights(), {name: p.detach().clone() for name, p in run.model.module.named_parameters()}


def test_save_model_in_mid_round_saves_the_common_weights(run_ranks: Any, tmp_path: Path) -> None:
    (first, named), (second, _) = run_ranks(_save_model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(first, second) and all(torch.equal(named[name], saved[name]) for name in named)
