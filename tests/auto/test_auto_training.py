"""A decision of `auto` trains as if its hook had been asked for by name."""

import math
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks import HookConfigError, HookRunError
from commhooks.auto import compressor as auto_compressor
from commhooks.auto import trials
from commhooks.auto.compressor import AutoCompressor
from commhooks.auto.options import Auto, Candidate
from commhooks.auto.trials import TRIAL_S, TRIAL_STEPS, WARM_UP, Decision, Watch
from commhooks.auto.watch import Ranks
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.gradients.names import ModelNames, all_names
from commhooks.plan import parameter_plans
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.inside import session_of
from tests.support.models import masks
from tests.support.prescribed_auto import (
    BEGIN,
    TRIAL,
    PrescribedAutoCompressor,
    decided,
    decision_of,
    new,
)
from tests.support.training import Run, residuals

# ---- as the choice by name -----------------------------------------------------------------------


def _as_by_name() -> dict[str, Any]:
    run = new().train(8)
    chosen = decision_of(run).candidate
    by_name = Run.new(hook=chosen.hook, hook_options={**chosen.options, "start_iter": 2}).train(8)
    plan = run.hook.plan()
    return {
        "label": chosen.label,
        "same": torch.equal(run.weights(), by_name.weights()),
        "weights": run.weights(),
        "stats": run.hook.stats(),
        "plan": plan.as_dict(),
        "plan by name": by_name.hook.plan().as_dict(),
        "table": str(plan),
        "notes": run.hook.state_dict()["notes"],
        "residuals": residuals(run.hook).keys() == residuals(by_name.hook).keys(),
    }


def test_the_choice_trains_as_by_name(run_ranks: Any) -> None:
    ranks = run_ranks(_as_by_name)
    for rank in ranks:
        assert rank["label"] == rank["stats"]["chosen"] == "int8"
        assert rank["same"]
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        assert rank["notes"] == ranks[0]["notes"] and rank["notes"]["since"] == 2
        assert rank["residuals"]
        assert rank["stats"]["compressed_steps"] == 6
        assert rank["plan"]["parameters"] == rank["plan by name"]["parameters"]
        assert (
            rank["plan"]["hook"] == f"prescribed_auto: {rank['label']}"
            and rank["label"] in rank["table"]
        )


def _without_memory() -> str:
    """Rank 1 has no memory for what is tried, while all of it is asked for."""
    empty = torch.empty

    def refusing(*size: Any, **how: Any) -> torch.Tensor:
        if dist.get_rank() == 1 and how.get("dtype") == torch.uint8 and isinstance(size[0], int):
            raise torch.OutOfMemoryError("no memory left")
        return empty(*size, **how)

    with mock.patch.object(torch, "empty", refusing):
        run = new(bf16_s=None).train(BEGIN + TRIAL + 2)
    return run.hook.stats()["chosen"]


def test_what_a_rank_has_no_memory_for_is_not_tried(run_ranks: Any) -> None:
    assert run_ranks(_without_memory) == ["allreduce"] * 2


def _decides_by_the_clock() -> dict[str, Any]:
    run = Run.new(hook="auto", hook_options={"measure_steps": 8, "quality": "close"})
    before = run.train(6).hook.stats()
    reference = Run.new(hook="allreduce").train(6)
    weights = run.weights()
    labels = set()
    with mock.patch.object(trials, "TRIAL_S", 0.03):
        while decision_of(run).phase != "decided":
            labels.add(decision_of(run).candidate.label)
            run.train(5)
    return {
        "before": before["chosen"],
        "as all-reduce": torch.equal(weights, reference.weights()),
        "tried": labels,
        "decision": run.hook.state_dict()["notes"],
        "weights": run.weights(),
    }


def test_real_clocks_lead_to_one_decision(run_ranks: Any) -> None:
    """Which one is up to the machine."""
    ranks = run_ranks(_decides_by_the_clock)
    for rank in ranks:
        assert rank["before"] == "allreduce" and rank["as all-reduce"], "measuring changes nothing"
        assert rank["decision"] == ranks[0]["decision"] and torch.equal(
            rank["weights"], ranks[0]["weights"]
        )
        tried_s = rank["decision"]["figures"]["tried_s"]
        labels = [candidate["label"] for candidate in rank["decision"]["candidates"]]
        assert list(tried_s)[0] == "allreduce" and "powerSGD rank 16" in labels
        assert all(seconds > 0 for seconds in tried_s.values()) and len(rank["tried"]) > 1


# ---- the change ----------------------------------------------------------------------------------


def _tries_all() -> dict[str, Any]:
    """int8 and bf16 are slower than all-reduce."""
    labels = []
    with log_lines("commhooks") as lines:
        run = new(tried_s=2.0, bf16_s=1.5)
        for _ in range(BEGIN + 2 * TRIAL + 1):
            run.train(1)
            labels.append(run.hook.stats()["chosen"])
    return {
        "labels": labels,
        "decision": decision_of(run).to_plain(),
        "lines": [line for line in lines if "auto: " in line],
        "weights": run.weights(),
    }


def test_each_candidate_is_tried_in_training_steps(run_ranks: Any) -> None:
    ranks = run_ranks(_tries_all)
    for rank in ranks:
        assert rank["labels"] == ["allreduce"] * BEGIN + ["int8"] * TRIAL + ["bf16"] * TRIAL + [
            "allreduce"
        ]
        assert rank["decision"] == ranks[0]["decision"] and rank["decision"]["phase"] == "decided"
        assert torch.equal(rank["weights"], ranks[0]["weights"])
    (line,) = ranks[0]["lines"]
    assert f"auto: allreduce from step {BEGIN + 2 * TRIAL} on, " in line and ranks[1]["lines"] == []
    assert "nothing helps here; a step takes 1000 ms, 2000 ms with int8, 1500 ms with bf16" in line


def _one_rank_has_no_times(after: int) -> dict[str, Any]:
    """From step `after` on."""
    most = mock.patch.object(trials, "MOST_EXTENSIONS", 1)
    with log_lines("commhooks") as lines, most:
        run = new().train(after)
        if dist.get_rank() == 1:
            compressor = session_of(run.hook).compressor
            assert isinstance(compressor, PrescribedAutoCompressor)
            numbers = lambda: [float(len(run.ddp.module)), 9.0, math.nan]  # type: ignore[arg-type]  # noqa: E731
            compressor._numbers = numbers  # type: ignore[method-assign]
        run.train(BEGIN + WARM_UP + 2 * TRIAL_STEPS)
    return {"decision": decision_of(run), "lines": [line for line in lines if "auto: " in line]}


def test_times_that_make_no_sense_on_one_rank_leave_all_with_all_reduce(run_ranks: Any) -> None:
    ranks = run_ranks(_one_rank_has_no_times, 1)
    for rank in ranks:
        assert rank["decision"].to_plain() == ranks[0]["decision"].to_plain()
        assert (
            rank["decision"].candidate.label == "allreduce" and rank["decision"].phase == "decided"
        )
    assert [len(rank["lines"]) for rank in ranks] == [1, 0] and "make no sense" in ranks[0][
        "lines"
    ][0]


def test_a_trial_that_cannot_be_measured_is_taken_back(run_ranks: Any) -> None:
    ranks = run_ranks(_one_rank_has_no_times, BEGIN + 1)
    for rank in ranks:
        assert rank["decision"].to_plain() == ranks[0]["decision"].to_plain()
        assert (
            rank["decision"].candidate.label == "allreduce" and rank["decision"].phase == "decided"
        )
    assert "int8 could not be measured" in ranks[0]["lines"][0]


def _different_decisions(differ: str) -> str:
    run = new().train(4)
    session = session_of(run.hook)
    compressor = session.compressor
    assert isinstance(compressor, AutoCompressor)
    other = {"what": decided("int4"), "when": decided(phase="measuring", watch=Watch(9, 17))}[
        differ
    ]
    session.consensus.replace_compressor(
        compressor._with(other if dist.get_rank() else decided("int8"))
    )
    with pytest.raises(HookRunError) as caught:
        run.train(1)
    return str(caught.value)


@pytest.mark.parametrize("differ", ["what", "when"])
def test_ranks_with_different_decisions_say_so(run_ranks: Any, differ: str) -> None:
    for text in run_ranks(_different_decisions, differ):
        assert "run different hooks, options or models" in text


def test_a_save_in_another_thread_does_not_wait_for_the_decision() -> None:
    """A joint save holds the lock while it waits for ranks whose training may wait for this one."""
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

        gathered = Ranks.table
        with mock.patch.object(Ranks, "table", table):
            run.train(1)
        assert waited and not any(waited) and saved[0]["notes"]["phase"] == "measuring"
        assert decision_of(run).phase == "trying"


def test_where_the_host_does_not_read_each_outcome_nothing_is_extended() -> None:
    """As on an accelerator: the step that the host knows is that of the latest decision."""
    with process_group_of_one(), masks():
        run = new()
        extended = []
        for _ in range(2 + TRIAL + 3):
            run.train(1)
            extended.append(decision_of(run).extended)
        assert decision_of(run).phase == "decided" and not any(extended)


def _taken_back(finite: bool) -> dict[str, Any]:
    """int8 is worse than all-reduce. The first pass after it may be not finite on one rank."""
    run = new(tried_s=2.0, bf16_s=None).train(2 + TRIAL)
    plain = Run.new(hook="allreduce")
    before = residuals(run.hook)
    run.optimizer.zero_grad()
    images = torch.full((8, 1, 8, 8), 0.5 if finite or dist.get_rank() else float("nan"))
    run.ddp(images).square().sum().backward()
    chosen = run.hook.stats()["chosen"]
    during = residuals(run.hook)
    plain.ddp.module.load_state_dict(run.ddp.module.state_dict())
    plain.step = run.step
    same = torch.equal(run.train(1).gradients[-1], plain.train(1).gradients[-1])
    return {
        "before": before,
        "during": during,
        "chosen": chosen,
        "same": same,
        "weights": run.weights(),
    }


@pytest.mark.parametrize("finite", [True, False])
def test_a_choice_that_is_taken_back_leaves_no_residuals(run_ranks: Any, finite: bool) -> None:
    ranks = run_ranks(_taken_back, finite)
    for rank in ranks:
        assert (
            rank["before"] and not rank["during"] and rank["chosen"] == "allreduce" and rank["same"]
        )
        assert torch.equal(rank["weights"], ranks[0]["weights"])


# ---- options and topologies ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "offered", Auto(quality="close", exclude=["0.*"]).candidates, ids=lambda x: x.label
)
def test_the_plan_is_that_of_the_candidate_in_force(offered: Candidate) -> None:
    """What is excluded counts for the candidates that have this option; bf16 casts everything."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    names = ModelNames(list(model.named_parameters()), all_names(model))
    alone = auto_compressor.new(offered)
    decision = Decision(offered, None, since=3, phase="decided")
    chosen = AutoCompressor(Auto(quality="close", exclude=["0.*"]), decision=decision)
    plans = [parameter_plans(plan, names) for plan in (chosen, alone)]
    assert plans[0] == plans[1] and chosen.wire_dtype == alone.wire_dtype
    excluded = {plan.name for plan in plans[0] if "excluded" in plan.reason}
    assert excluded == ({"0.weight", "0.bias"} if alone.state_fields else set())
    # No residual can belong to what is excluded, whichever candidate comes next.
    infos = [
        ParameterInfo.of(name, p, names, chosen.config)
        for name, p in names.named_parameters().items()
    ]
    assert chosen.may_compress(infos) == [False, False, True, False]


def test_one_rank_has_nothing_to_gain() -> None:
    with process_group_of_one():
        run = Run.new(hook="auto", hook_options={"measure_steps": 6}).train(12)
        while decision_of(run).phase != "decided":
            run.train(10)
        assert run.hook.stats()["chosen"] == "allreduce" and decision_of(run).watch is None
        reference = Run.new(hook="allreduce").train(run.step)
        assert torch.equal(run.weights(), reference.weights())


def test_without_a_watch_nothing_is_measured() -> None:
    with process_group_of_one():
        run = Run.new(hook="powerSGD", hook_options={"start_powerSGD_iter": 1})
        with mock.patch("commhooks.auto.watch.mark", side_effect=AssertionError):
            run.train(3)
        assert commhooks.__version__ and run.hook.stats()["chosen"] is None


def test_short_steps_are_tried_for_a_quarter_of_a_second() -> None:
    with process_group_of_one():
        run = new(tried_s=0.01).train(BEGIN + TRIAL + 1)
        assert decision_of(run).phase == "trying" and decision_of(run).since == BEGIN
        run.train(math.ceil(TRIAL_S / 0.01) - TRIAL_STEPS)
        assert decision_of(run).phase == "decided" and run.hook.stats()["chosen"] == "int8"


def test_options_that_make_no_sense_are_refused() -> None:
    for options in ({"quality": "good"}, {"measure_steps": 1}, {"exclude": [""]}):
        with pytest.raises(HookConfigError, match="Auto: "):
            Auto(**options)  # type: ignore[arg-type]
