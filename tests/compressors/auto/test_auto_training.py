"""`auto` in training: what it decides is done, as if it had been asked for by name; at, before and after the change."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ddp_steps import log_lines, process_group_of_one
from inside import session_of
from models import masks
from prescribed_auto import PrescribedAutoCompressor, decided, decision_of, new
from training import Run, residuals

import commhooks
from commhooks import HookConfigError, HookRunError
from commhooks.compressors.auto.compressor import AutoCompressor
from commhooks.compressors.auto.config import Auto
from commhooks.compressors.auto.decision import Decision
from commhooks.compressors.auto.phases import MOST_EXTENSIONS, TRY_STEPS
from commhooks.compressors.auto.watcher import Watcher
from commhooks.compressors.observation import Watch
from commhooks.engine.observer import GroupRanks

FAST_LINK = 1e7


# ---- as the choice by name -------------------------------------------------------------------------------------------


def _as_by_name(options: dict[str, Any]) -> dict[str, Any]:
    with log_lines("commhooks") as lines:
        run = new(**options).train(8)
    chosen = decision_of(run).candidate
    option = chosen.new().Config.start_option
    start = {} if option is None else {option: 2}
    by_name = Run.new(hook=chosen.hook, hook_options={**chosen.options, **start}).train(8)
    plan = run.hook.plan()
    return {
        "label": chosen.label,
        "hook": chosen.hook,
        "options": dict(chosen.options),
        "same": torch.equal(run.weights(), by_name.weights()),
        "weights": run.weights(),
        "stats": run.hook.stats(),
        "plan": plan.as_dict(),
        "plan by name": by_name.hook.plan().as_dict(),
        "table": str(plan),
        "lines": [line for line in lines if "auto: " in line],
        "notes": run.hook.state_dict()["notes"],
        "residuals": residuals(run.hook).keys() == residuals(by_name.hook).keys() if start else True,
    }


@pytest.mark.parametrize(
    ("options", "label", "compressed"),
    [
        ({}, "int8", 6),
        ({"quality": "close"}, "int4", 6),  # of layers so small rank 16 keeps half of the bytes
        ({"quality": "close", "target": 3000}, "powerSGD, 3000 bytes", 6),
        ({"quality": "close", "target": 0.001}, "powerSGD, 0.001 of energy", 6),
        ({"mbit_per_s": FAST_LINK, "codec_s": 0.5}, "allreduce", 0),
        ({"codec_s": 5.0}, "bf16", 0),
    ],
)
def test_the_choice_trains_as_by_name(run_ranks: Any, options: dict[str, Any], label: str, compressed: int) -> None:
    ranks = run_ranks(_as_by_name, options)
    for rank in ranks:
        assert rank["label"].startswith(label) and rank["stats"]["chosen"] == rank["label"]
        assert rank["same"] or label == "bf16", "bf16 rounds what was divided, by name it divides what was rounded"
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        assert rank["notes"] == ranks[0]["notes"] and rank["notes"]["since"] == 2
        assert rank["residuals"]
        assert rank["stats"]["compressed_steps"] == compressed
        assert rank["plan"]["parameters"] == rank["plan by name"]["parameters"]
        assert rank["plan"]["hook"] == f"prescribed_auto: {rank['label']}" and rank["label"] in rank["table"]
    (line,) = ranks[0]["lines"]
    assert ranks[1]["lines"] == []
    assert f"auto: {ranks[0]['label']} from step 2 on" in line and "1000 ms (measured)" in line
    assert ("nothing helps here" in line) == (label == "allreduce")
    if "target" in options:
        ranks_by_glob = ranks[0]["options"]["matrix_approximation_rank"]
        assert set(ranks_by_glob) == {"0.weight", "3.weight", "5.weight", "7.weight"}


def _decides_by_the_clock() -> dict[str, Any]:
    run = Run.new(hook="auto", hook_options={"measure_steps": 8, "quality": "close"})
    before = run.train(6).hook.stats()
    probed = session_of(run.hook).compressor._watcher.report()  # type: ignore[attr-defined]
    reference = Run.new(hook="allreduce").train(6)
    weights = run.weights()
    run.train(30)
    return {
        "before": before["chosen"],
        "as all-reduce": torch.equal(weights, reference.weights()),
        "codec": [each for each in probed.codec_s if math.isfinite(each)],
        "passes": probed.passes,
        "decision": run.hook.state_dict()["notes"],
        "weights": run.weights(),
    }


def test_real_clocks_lead_to_one_decision(run_ranks: Any) -> None:
    """Which one is up to the machine."""
    ranks = run_ranks(_decides_by_the_clock)
    for rank in ranks:
        assert rank["before"] == "allreduce" and rank["as all-reduce"], "measuring changes nothing"
        assert rank["passes"] >= 3 and len(rank["codec"]) >= 3 and all(each > 0 for each in rank["codec"])
        assert rank["decision"] == ranks[0]["decision"] and torch.equal(rank["weights"], ranks[0]["weights"])
        assert rank["decision"]["since"] is not None and rank["decision"]["figures"]["mbit_per_s"] > 0
        predicted = rank["decision"]["figures"]["predicted_s"]
        assert predicted.keys() >= {"allreduce", "bf16", "int8", "int4"} and len(predicted) > 4
        assert all(each > 0 for each in predicted.values())


# ---- the change ------------------------------------------------------------------------------------------------------


def _looks_again() -> dict[str, Any]:
    run = new(check_again_every=10, tried_s=0.1)
    run.train(2 + TRY_STEPS)
    labels = [run.hook.stats()["chosen"]]
    phases = [decision_of(run).phase]
    run.train(11)  # nothing has changed
    phases.append(decision_of(run).phase)
    switches = decision_of(run).switches
    config = session_of(run.hook).compressor.config
    object.__setattr__(config, "tried_s", 0.5)  # another job on the network
    object.__setattr__(config, "mbit_per_s", FAST_LINK)
    object.__setattr__(config, "codec_s", 0.45)
    run.train(10)
    phases.append(decision_of(run).phase)
    run.train(4)
    return {
        "labels": [*labels, run.hook.stats()["chosen"]],
        "phases": phases,
        "switches": [switches, decision_of(run).switches],
        "weights": run.weights(),
    }


def test_it_looks_again_and_changes_when_the_times_have(run_ranks: Any) -> None:
    ranks = run_ranks(_looks_again)
    for rank in ranks:
        assert rank["labels"] == ["int8", "allreduce"]
        assert rank["phases"] == ["trying", "resting", "measuring"] and rank["switches"] == [1, 2]
        assert torch.equal(rank["weights"], ranks[0]["weights"])


def _one_rank_has_no_times() -> dict[str, Any]:
    run = new()
    if dist.get_rank() == 1:
        compressor = session_of(run.hook).compressor
        assert isinstance(compressor, PrescribedAutoCompressor)
        report = compressor._report
        nonsense = lambda: dataclasses.replace(report(), step_s=math.nan)  # noqa: E731
        compressor._report = nonsense  # type: ignore[method-assign]
    with log_lines("commhooks") as lines:
        run.train(2 + MOST_EXTENSIONS * TRY_STEPS + 1)
    return {"decision": decision_of(run), "lines": [line for line in lines if "make no sense" in line]}


def test_times_that_make_no_sense_on_one_rank_leave_all_with_all_reduce(run_ranks: Any) -> None:
    ranks = run_ranks(_one_rank_has_no_times)
    for rank in ranks:
        assert rank["decision"].to_plain() == ranks[0]["decision"].to_plain()
        assert rank["decision"].candidate.label == "allreduce" and rank["decision"].phase == "resting"
    assert [len(rank["lines"]) for rank in ranks] == [1, 0]


def test_what_was_never_rehearsed_makes_it_measure_longer() -> None:
    with process_group_of_one():
        run = new(rehearsals=0).train(3)
        assert decision_of(run).phase == "measuring" and decision_of(run).extended == 1
        run.train(MOST_EXTENSIONS * TRY_STEPS)
        assert decision_of(run).since == 2 + MOST_EXTENSIONS * TRY_STEPS  # with what is known


def _one_rank_has_seen_nothing() -> Decision:
    run = new().train(2)
    compressor = session_of(run.hook).compressor
    assert isinstance(compressor, PrescribedAutoCompressor)
    if dist.get_rank() == 1:
        compressor._watcher = Watcher({}, None)
    run.train(TRY_STEPS + 1)
    return decision_of(run)


def test_a_rank_that_has_seen_nothing_makes_all_measure_longer(run_ranks: Any) -> None:
    for decision in run_ranks(_one_rank_has_seen_nothing):
        assert decision.candidate.label == "int8" and decision.since == 2 + TRY_STEPS


def _different_decisions(differ: str) -> str:
    run = new().train(4)
    session = session_of(run.hook)
    compressor = session.compressor
    assert isinstance(compressor, AutoCompressor)
    other = {"what": decided("int4"), "when": decided(phase="resting", watch=Watch(9, 17))}[differ]
    session.consensus.replaced(compressor._with(other if dist.get_rank() else decided("int8")))
    with pytest.raises(HookRunError) as caught:
        run.train(1)
    return str(caught.value)


@pytest.mark.parametrize("differ", ["what", "when"])
def test_ranks_with_different_decisions_say_so(run_ranks: Any, differ: str) -> None:
    for text in run_ranks(_different_decisions, differ):
        assert "run different hooks, options or models" in text


def test_a_save_in_another_thread_does_not_wait_for_the_decision() -> None:
    """A joint save holds the lock while it waits for the other ranks, whose training may wait for this rank's."""
    with process_group_of_one():
        run = new().train(2)  # decides with the next pass
        saved: list[Any] = []
        waited: list[bool] = []

        def table(ranks: Any, numbers: Any) -> Any:
            thread = threading.Thread(target=lambda: saved.append(run.hook.state_dict("per_rank")))
            thread.start()
            thread.join(5)
            waited.append(thread.is_alive())
            return gathered(ranks, numbers)

        gathered = GroupRanks.table
        with mock.patch.object(GroupRanks, "table", table):
            run.train(1)
        assert waited == [False, False] and saved[0]["notes"]["phase"] == "measuring"
        assert decision_of(run).phase == "trying"


def test_where_the_host_does_not_read_each_outcome_a_look_takes_no_longer() -> None:
    """As on an accelerator: the step that the host knows is that of the latest decision."""
    with process_group_of_one(), masks():
        run = new(check_again_every=20)
        extended = []
        for _ in range(2 + TRY_STEPS + 45):
            run.train(1)
            extended.append(decision_of(run).extended)
        assert decision_of(run).phase == "resting" and not any(extended)


def _not_finite_at_the_change() -> dict[str, Any]:
    run = new(tried_s=2.0).train(2 + TRY_STEPS)
    before = residuals(run.hook)
    run.optimizer.zero_grad()
    images = torch.full((8, 1, 8, 8), float("nan") if dist.get_rank() == 0 else 0.5)
    run.ddp(images).square().sum().backward()  # int8 is taken back with this pass
    during = residuals(run.hook)
    labels = run.hook.stats()["chosen"]
    run.train(1)
    return {"before": before, "during": during, "after": residuals(run.hook), "label": labels, "weights": run.weights()}


def test_a_step_that_is_not_finite_at_the_change_loses_nothing(run_ranks: Any) -> None:
    ranks = run_ranks(_not_finite_at_the_change)
    for rank in ranks:
        assert rank["label"] == "allreduce" and rank["after"] == {} and rank["weights"].isfinite().all()
        assert rank["before"].keys() == rank["during"].keys() and rank["before"]
        assert all(torch.equal(rank["before"][name], rank["during"][name]) for name in rank["before"])
        assert torch.equal(rank["weights"], ranks[0]["weights"])


# ---- options and topologies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"quality": "good"},
        {"target": 0.5},
        {"quality": "close", "target": 1.0},
        {"quality": "close", "target": 0},
        {"measure_steps": 1},
        {"check_again_every": 3},
        {"exclude": [""]},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(HookConfigError, match="Auto: "):
        Auto(**options)


def test_arrangements_and_wrappers_that_it_does_not_measure_are_refused() -> None:
    with process_group_of_one():
        with pytest.raises(HookConfigError, match="ranks_per_node.*which measures ranks that all"):
            Run.new(hook="auto", ranks_per_node=1)
        with pytest.raises(HookConfigError, match="wrapper='bf16' with hook 'auto', .* omit wrapper"):
            Run.new(hook="auto", wrapper="bf16")


def test_one_rank_has_nothing_to_gain() -> None:
    with process_group_of_one():
        run = Run.new(hook="auto", hook_options={"measure_steps": 6, "check_again_every": None}).train(12)
        assert run.hook.stats()["chosen"] == "allreduce" and decision_of(run).watch is None
        reference = Run.new(hook="allreduce").train(12)
        assert torch.equal(run.weights(), reference.weights())


def test_without_a_watch_nothing_is_measured() -> None:
    with process_group_of_one():
        run = Run.new(hook="powerSGD", hook_options={"start_powerSGD_iter": 1})
        with mock.patch("commhooks.engine.observer.mark", side_effect=AssertionError):
            run.train(3)
        assert commhooks.__version__ and run.hook.stats()["chosen"] is None
