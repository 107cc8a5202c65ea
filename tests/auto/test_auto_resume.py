"""A resume keeps the decision of `auto`, renews it with other ranks, and refuses a damaged one."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks import HookRunError, PayloadError
from commhooks.auto.options import Auto
from commhooks.auto.trials import TRIAL_STEPS, Decision, Watch, resumed
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.prescribed_auto import BEGIN, TRIAL, decided, decision_of, new
from tests.support.training import Run, residuals


def _in_a_trial() -> dict[str, Any]:
    options = {"measure_steps": 4, "quality": "low rank"}
    run = new(**options).train(5)
    saved = run.save(residual="mean")
    again = new(**options).load(saved)
    decisions = [decision_of(run).to_plain(), decision_of(again).to_plain()]
    run.train(TRIAL + 4)
    again.train(TRIAL + 4)
    return {
        "exact": saved["hook"]["exact"],
        "phase": decisions[0]["phase"],
        "decisions": decisions,
        "after": [decision_of(run).to_plain(), decision_of(again).to_plain()],
        "weights": [run.weights(), again.weights()],
    }


def test_a_run_that_resumes_goes_on_as_the_one_that_saved(run_ranks: Any) -> None:
    """In a trial. A run that has chosen resumes in test_auto_nodes.py."""
    for rank in run_ranks(_in_a_trial):
        assert rank["exact"] and rank["phase"] == "trying"
        assert rank["decisions"][0] == rank["decisions"][1] and rank["after"][0] == rank["after"][1]
        assert torch.equal(*rank["weights"])


def _too_late() -> dict[str, Any]:
    run = new(measure_steps=4).train(4)
    saved = run.save(residual="mean")
    again = new(measure_steps=4).load(saved)
    phases = []
    for _ in range(TRIAL_STEPS + 2):
        again.train(1)
        phases.append((decision_of(again).phase, decision_of(again).candidate.label))
    return {"phases": phases, "weights": again.weights()}


def test_a_run_that_has_measured_nothing_yet_measures_longer(run_ranks: Any) -> None:
    """Saved just before the decision; what was measured until then is not saved."""
    ranks = run_ranks(_too_late)
    for rank in ranks:
        assert (
            rank["phases"] == [("measuring", "allreduce")] * TRIAL_STEPS + [("trying", "int8")] * 2
        )
        assert torch.equal(rank["weights"], ranks[0]["weights"])


def _save(steps: int = BEGIN + TRIAL + 1) -> dict[str, Any]:
    return new().train(steps).save(residual="mean")


def _elastic(saved: dict[str, Any]) -> dict[str, Any]:
    run = new().load(saved)
    before = decision_of(run)
    run.train(6)
    return {"before": before, "after": decision_of(run), "weights": run.weights()}


def test_another_number_of_ranks_measures_anew_with_the_choice_in_force(run_ranks: Any) -> None:
    saved = run_ranks(_save)[0]
    assert saved["hook"]["notes"]["phase"] == "decided"
    ranks = run_ranks(_elastic, saved, world_size=3)
    for rank in ranks:
        before, after = rank["before"], rank["after"]
        assert before.candidate.label == "int8" and list(after.tried_s) == ["int8"]
        assert before.phase == "measuring" and (before.watch.begin, before.watch.end) == (14, 15)
        assert not before.tried_s
        assert torch.equal(rank["weights"], ranks[0]["weights"])


def test_with_another_number_of_ranks_a_trial_is_taken_back(run_ranks: Any) -> None:
    saved = run_ranks(_save, BEGIN + 4)[0]
    assert saved["hook"]["notes"]["phase"] == "trying"
    for rank in run_ranks(_elastic, saved, world_size=3):
        assert rank["before"].candidate.label == "allreduce" and rank["before"].phase == "measuring"
        # It has chosen nothing yet, and says so.
        assert rank["before"].since is None and rank["before"].summary == ""


def test_residuals_of_what_is_excluded_now_are_dropped() -> None:
    with process_group_of_one():
        saved = new().train(BEGIN + TRIAL + 1).save(residual="per_rank")
        with log_lines() as lines:
            again = new(exclude=["3.*"]).load(saved)
        assert again.hook.stats()["chosen"] == "int8"
        assert residuals(again.hook).keys() == {"0.weight", "5.weight", "7.weight"}
        (line,) = (line for line in lines if "no longer" in line)
        assert line.endswith("their saved residuals are dropped: 3.weight")


def _one_rank_loads(saved: dict[str, Any]) -> str:
    run = new()
    if dist.get_rank() == 0:
        saved["hook"]["notes"] = decided(phase="measuring", watch=Watch(9, 11)).to_plain()
        run.load(saved)  # at a later step: it would decide in the next pass
    with pytest.raises(HookRunError) as caught:
        run.train(1)
    return str(caught.value)


def test_a_load_on_one_rank_only_is_an_error_before_that_rank_decides(run_ranks: Any) -> None:
    saved = run_ranks(_save)[0]
    for text in run_ranks(_one_rank_loads, saved):
        assert "the ranks are at different steps of the hook: rank 0: 13, rank 1: 0" in text


def test_the_residuals_of_a_choice_that_is_not_allowed_are_dropped() -> None:
    with process_group_of_one():
        run = new(quality="low rank").train(6)
        saved = run.save(residual="per_rank")
        assert residuals(run.hook) and run.hook.stats()["chosen"].startswith("powerSGD")
        again = new().load(saved)
        plain = Run.new(hook="allreduce")
        assert decision_of(again).since is None and not residuals(again.hook)
        plain.ddp.module.load_state_dict(saved["model"])
        plain.step = saved["step"]
        assert torch.equal(again.train(1).gradients[0], plain.train(1).gradients[0])


POWER = "powerSGD rank 16"
OFFERED = {candidate.label: candidate for candidate in Auto(quality="close").candidates}


def _decided(label: str, **more: Any) -> Decision:
    """With quality="close"."""
    others = dict(OFFERED)
    sent = dict.fromkeys(others, 100.0)
    made = Decision(
        others.pop(label), None, tuple(others.values()), 3, "decided", counted_bytes=sent
    )
    made = dataclasses.replace(made, tried_s={label: 0.4})
    return dataclasses.replace(made, **more)


def _resumed(saved: Decision, **options: Any) -> Decision:
    """At step 7. What it becomes can be saved and loaded."""
    made = resumed(saved, Auto(**{"quality": "close", **options}), 7, same_ranks=True)
    assert Decision.from_plain(made.to_plain()).candidates == made.candidates
    return made


def _measures(made: Decision, saved: Decision) -> bool:
    return (made.phase, made.watch, made.since) == ("measuring", Watch(9, 17), saved.since)


WATCH = Watch(9, 17)
BEGUN = Decision(OFFERED["allreduce"], WATCH)


@pytest.mark.parametrize("label", ["int8", POWER])
def test_the_same_options_change_nothing(label: str) -> None:
    phases = {"decided": None, "trying": WATCH, "measuring": WATCH}
    for now in (_decided(label, phase=phase, watch=watch) for phase, watch in phases.items()):
        assert _resumed(now) == now
    given_up = dataclasses.replace(BEGUN, since=3, phase="decided", watch=None)
    assert _resumed(given_up) == given_up


@pytest.mark.parametrize("label", ["int8", POWER])
def test_a_changed_exclude_takes_effect_after_a_resume(label: str) -> None:
    now = _decided(label)
    made = _resumed(now, exclude=["*embed*"])
    assert _measures(made, now) and made.candidate.label == label
    assert all(
        candidate.options.get("exclude", ["*embed*"]) == ["*embed*"]
        for candidate in made.candidates.values()
    )


def test_a_choice_of_other_options_is_made_anew() -> None:
    low = dataclasses.replace(
        OFFERED[POWER], options={"matrix_approximation_rank": 2, "exclude": []}
    )
    assert _resumed(dataclasses.replace(_decided(POWER), candidate=low)) == BEGUN


def test_another_quality_counts_after_a_resume() -> None:
    now = _decided("int8")
    made = _resumed(now, quality="same")
    labels = {"allreduce", "bf16", "int8"}
    assert _measures(made, now) and made.candidates.keys() == made.counted_bytes.keys() == labels
    # saved with quality="same"
    same = _decided("int8", others=made.others, counted_bytes=made.counted_bytes)
    assert _measures(_resumed(same), same)
    assert _resumed(_decided("int4"), quality="same") == BEGUN


BAD: list[tuple[str, Any]] = [
    ("label", "int9"),
    ("label", None),
    ("candidates", []),
    ("candidates", [{"label": "int8", "hook": "os:system", "options": {}, "changes": 1.0}]),
    ("candidates", [{"label": "int8", "hook": "x" * 10_000, "options": {}, "changes": 1.0}]),
    (
        "candidates",
        [{"label": "int8", "hook": "int8_compress", "options": {"block_size": 7}, "changes": 1.0}],
    ),
    (
        "candidates",
        [{"label": "int8", "hook": "int8_compress", "options": {"no": 7}, "changes": 1.0}],
    ),
    (
        "candidates",
        [{"label": "i", "hook": "int8_compress", "options": {"n" * 10_000: 7}, "changes": 1.0}],
    ),
    ("candidates", [{"label": "int8", "hook": "int8_compress", "options": {}, "changes": "x"}]),
    ("candidates", [{"label": "int8", "hook": "int8_compress", "options": {}, "changes": 10**400}]),
    ("since", -1),
    ("since", 2**63),
    ("since", 1.5),
    ("phase", "asleep"),
    ("watch", [1]),
    ("watch", [True, 2]),
    ("switches", None),
    ("extended", "1"),
    ("why", 3),
    ("figures", {}),
    ("figures", {"tried_s": {"int9": 1.0}, "counted_bytes": {}}),
    ("figures", {"tried_s": {}, "counted_bytes": {"int9": 1.0}}),
    ("figures", {"tried_s": {"int8": 10**400}, "counted_bytes": {}}),
    ("figures", {"tried_s": {"int8": -1.0}, "counted_bytes": {}}),
    ("figures", {"tried_s": {"int8": 0.0}, "counted_bytes": {}}),
    ("figures", {"tried_s": {"int8": 1e-310}, "counted_bytes": {}}),
    ("figures", {"tried_s": {"int8": math.inf}, "counted_bytes": {}}),
    ("figures", {"tried_s": {}, "counted_bytes": {"int8": math.nan}}),
    ("figures", None),
    ("phase", "trying"),  # without figures
]


def test_a_damaged_decision_is_refused_and_changes_nothing() -> None:
    with process_group_of_one():
        run = Run.new(hook="auto")
        saved = run.save(residual="per_rank")["hook"]
        before = decision_of(run)
        for notes in (
            [],
            "x",
            {"label": "int8"},
            3,
            *({**decided().to_plain(), key: value} for key, value in BAD),
        ):
            with pytest.raises(PayloadError) as caught:
                run.hook.load_state_dict({**saved, "notes": notes})
            assert decision_of(run) is before, notes
            assert len(str(caught.value)) < 1000


def test_decisions_of_earlier_versions_are_read() -> None:
    """They measured again from time to time, and had further figures, with which they predicted."""
    made = _decided("int8", tried_s={"allreduce": 1.0, "int8": 0.4})
    saved = made.to_plain() | {"phase": "resting", "watch": [40, 48]}
    saved["figures"] |= {
        "step_s": 0.4,
        "waiting_s": None,
        "predicted_s": {"int8": 0.5},
        "codec_s": {},
        "spent_s": 0.1,
    }
    saved["figures"] |= {"mbit_per_s": 941.0, "latency_ms": 0.2}
    assert Decision.from_plain(saved) == made
    trying = dataclasses.replace(made, phase="trying", tried_s={"allreduce": 1.0}).to_plain()
    assert Decision.from_plain({**saved, **trying}).phase == "trying"
