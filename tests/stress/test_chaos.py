"""Trainings that are killed at chosen moments resume by themselves to the same weights; see `make chaos` for more."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.stress import chaos, chaos_training
from tests.support import warm
from tests.support.accelerators import accelerate_launched

STEPS = chaos_training.STEPS
PRELOADED = {"lightning": ["lightning.pytorch"], "accelerate": ["accelerate"], "accelerate-fsdp2": ["accelerate"]}


class _NoKiller(chaos_training.Killer):
    """Watches a training that is left alone."""

    def __init__(self) -> None:
        with mock.patch.dict(os.environ, {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}):
            super().__init__(Path())

    def note(self, kind: str, **what: Any) -> None:
        pass


def _left_alone(framework: str, folder: str) -> torch.Tensor:
    # As torchrun would have it; the process group is there already.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with accelerate_launched(TORCHELASTIC_RUN_ID="1", GROUP_RANK="0"):
            return chaos_training.FRAMEWORKS[framework](Path(folder), _NoKiller())[0]
    finally:
        signal.signal(signal.SIGTERM, handler)


def _killed(run_ranks: Any, framework: str, folder: Path, kills: list[dict[str, Any]]) -> list[chaos.Kill]:
    (folder / "alone").mkdir()
    world_size = chaos.RANKS.get(framework, 2)
    uncompressed, *others = run_ranks(_left_alone, framework, str(folder / "alone"), world_size=world_size)
    assert all(torch.equal(uncompressed, other) for other in others)
    python = warm.python(*PRELOADED.get(framework, []))
    outcome = chaos.compare(chaos.run(framework, folder / "killed", kills, STEPS, python), uncompressed)
    assert outcome.failures == [], outcome.output[-4000:]
    assert len(outcome.kills) == len(kills)
    for kill, planned in zip(outcome.kills, kills, strict=True):
        assert (kill.rank, kill.phase, kill.step) == (planned["rank"], planned["phase"], planned["step"])
    return outcome.kills


@pytest.mark.timeout(300)
def test_plain_torch_killed_in_mid_backward_in_mid_save_and_between_steps(run_ranks: Any, tmp_path: Path) -> None:
    kills = [
        {"rank": 1, "phase": "backward", "step": 7},
        {"rank": 0, "phase": "save", "step": 10},
        {"rank": 1, "phase": "between", "step": 13},
    ]
    backward, save, between = _killed(run_ranks, "plain", tmp_path, kills)
    assert backward.last_issued == "P of bucket 0 at step 7"  # and of four buckets nothing else
    assert [kill.resumed_at for kill in (backward, save, between)] == [5, 5, 10]
    for kill in (backward, save, between):
        assert kill.survivor is not None and kill.survivor["type"] == "HookRunError"
        assert kill.survivor["seconds"] < chaos.GROUP_TIMEOUT_S
    assert "P of bucket" in backward.survivor["text"] and "at step 7" in backward.survivor["text"]
    # Half of the file was written under another name; the run has gone on beside it.
    torch.load(tmp_path / "killed" / "checkpoint.pt", weights_only=True)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("framework", "rank", "step", "interrupted"),
    [
        ("int8", 0, 8, "shares of bucket 0 at step 8"),
        ("nodes", 1, 8, "at step 8"),
        ("fsdp2", 1, 8, "at step 8"),
        ("diloco", 1, 8, "bucket 0 at step 5"),  # half of the weights on its way
        ("auto", 1, 12, "shares of bucket 0 at step 12"),  # the first pass with what it has chosen
    ],
)
def test_killed_in_mid_backward(
    run_ranks: Any, tmp_path: Path, framework: str, rank: int, step: int, interrupted: str
) -> None:
    before = step - step % chaos_training.SAVE_EVERY
    kills: list[dict[str, Any]] = [{"rank": rank, "phase": "backward", "step": step}]
    if framework == "diloco":  # a thread sends
        kills[0]["issued"] = interrupted
    if framework == "fsdp2":  # which has a way of its own to save
        kills.append({"rank": 0, "phase": "save", "step": before + chaos_training.SAVE_EVERY})
    done = _killed(run_ranks, framework, tmp_path, kills)
    assert done[0].last_issued is not None and done[0].last_issued.endswith(interrupted)
    for kill in done:
        assert kill.resumed_at == before
        if framework in chaos.END_BY_THEMSELVES:
            assert kill.survivor is not None and kill.survivor["type"] == "HookRunError"


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("framework", "rank"), [("lightning", 0), ("accelerate", 1), ("accelerate-fsdp2", 0)])
def test_killed_in_mid_save(run_ranks: Any, tmp_path: Path, framework: str, rank: int) -> None:
    (kill,) = _killed(run_ranks, framework, tmp_path, [{"rank": rank, "phase": "save", "step": 10}])
    assert kill.resumed_at == 5


# ------------------------------------------------------------------------------------------ the campaign sees failures


GOOD = chaos.Kill(1, "training", 12, True, None, 10, {"type": "HookRunError", "text": "", "seconds": 0.1})


def test_a_good_kill_fails_nothing() -> None:
    for framework in chaos.FRAMEWORKS:
        assert chaos._wrong(GOOD, framework) == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"resumed_at": None}, "never resumed"),
        ({"resumed_at": 5}, "killed at step 12, resumed at 5: further back than the last checkpoint"),
        ({"survivor": None}, "the other rank did not end by itself"),
        ({"survivor": {"seconds": 26.0}}, "the other rank ended 26 s later"),
    ],
)
def test_each_broken_promise_is_a_failure(changes: dict[str, Any], text: str) -> None:
    assert chaos._wrong(dataclasses.replace(GOOD, **changes), "plain") == text


def test_other_weights_are_a_failure() -> None:
    weights = torch.ones(3)
    for output, more in (("", ""), ("... marked inexact ...", " (a checkpoint was marked inexact)")):
        outcome = chaos.Outcome("plain", 1.0, [GOOD], [], [{"weights": weights}], output=output)
        assert chaos.compare(outcome, weights.clone()).failures == []
        assert chaos.compare(outcome, weights + 1e-7).failures == [
            f"other weights than the training that was left alone{more}"
        ]
