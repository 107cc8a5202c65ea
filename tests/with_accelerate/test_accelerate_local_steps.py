"""Hooks that average weights once in several steps, with Accelerate: `save_state` in mid-round, and a resume."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_commhooks import CommHookKwargs
from tests.support.accelerators import Training, launched

HOOK: dict[str, Any] = {"hook": "diloco", "hook_options": {"sync_every": 3, "outer_momentum": 0.3}}


@launched
def _save(folder: str) -> Any:
    run = Training(CommHookKwargs(**HOOK)).train(4)
    before = run.weights()
    run.save(folder)
    saved = run.weights()
    return before, saved, run.train(5).weights()


@launched
def _resume(folder: str) -> Any:
    run = Training.resumed(folder, 4, CommHookKwargs(**HOOK))
    return run.weights(), run.train(5).weights()


def test_a_resume_in_mid_round_is_bit_equal(run_ranks, tmp_path):
    saved = run_ranks(_save, str(tmp_path))
    resumed = run_ranks(_resume, str(tmp_path))
    assert not torch.equal(saved[0][0], saved[1][0])  # in mid-round
    for (_, common, end), (loaded, again) in zip(saved, resumed, strict=True):
        assert torch.equal(common, saved[0][1]) and torch.equal(common, loaded)
        assert torch.equal(end, again)
    assert not torch.equal(saved[0][2], saved[1][2])
