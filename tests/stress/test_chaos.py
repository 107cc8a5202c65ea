"""Trainings that die at chosen moments go on by themselves to the same weights. `make chaos` draws
more.
"""

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.stress import chaos_cases, chaos_members, chaos_runs
from tests.stress.chaos_cases import Case, Combination, Death
from tests.stress.chaos_runs import Outcome
from tests.stress.chaos_twins import Twins
from tests.support import warm


def _dies(run_ranks: Any, folder: Path, combination: str, death: Death, steps: int = 10) -> Outcome:
    """A run whose weights, notes and steps are as they should be."""
    case = Case(Combination(*combination.split(), steps=steps), death)
    outcome = chaos_runs.run(case, folder / "run", warm.python("lightning.pytorch"))
    assert chaos_runs.judge(outcome, Twins(run_ranks).of(outcome)).failures == [], outcome.output[
        -4000:
    ]
    return outcome


@pytest.mark.timeout(240)
def test_one_rank_is_killed_in_mid_backward(run_ranks: Any, tmp_path: Path) -> None:
    """With half of the weights on its way in a thread. With PowerSGD: `test_stragglers.py`."""
    death = Death("one", "backward", 8, rank=1, issued="outer step 5")
    outcome = _dies(run_ranks, tmp_path, "plain ddp diloco", death)
    assert outcome.last_issued is not None and outcome.last_issued.endswith("outer step 5")
    assert (outcome.died_in, outcome.died_at, outcome.resumed_at) == ("backward", 8, 5)
    (survivor,) = outcome.survivors
    assert survivor["type"] == "HookRunError" and survivor["seconds"] < chaos_cases.GROUP_TIMEOUT_S


@pytest.mark.timeout(240)
def test_a_rank_is_gone_in_mid_save(run_ranks: Any, tmp_path: Path) -> None:
    outcome = _dies(
        run_ranks, tmp_path, "plain ddp powerSGD", Death("save", "saving", 10, file_bytes=1000)
    )
    assert (outcome.died_in, outcome.died_at, outcome.resumed_at) == ("saving", 10, 5)
    assert not (tmp_path / "run" / "error-0-0.json").exists()  # it had no time for an error


@pytest.mark.timeout(240)
def test_the_newest_checkpoint_is_cut_off(run_ranks: Any, tmp_path: Path) -> None:
    outcome = _dies(
        run_ranks, tmp_path, "fabric ddp int8", Death("truncated", "between", 12), steps=15
    )
    assert (outcome.died_at, outcome.message, outcome.resumed_at) == (12, "refused", 5)
    assert "step_10.pt" in outcome.output and "it is cut off after" in outcome.output


@pytest.mark.timeout(240)
def test_machines_come_and_go(tmp_path: Path) -> None:
    row = chaos_members.run(tmp_path, random.Random(0), steps=400, hold=4)
    assert row["failures"] == [] and row["deaths"] > 0 and row["rounds"] == 8


# ---- the campaign sees failures ------------------------------------------------------------------

PLAIN = Combination("plain", "ddp", "powerSGD")
ERROR = {"type": "HookRunError", "text": "", "seconds": 0.1}
WEIGHTS = torch.ones(3)


def _outcome(kind: str = "one", front: str = "plain", **changes: Any) -> Outcome:
    """Of a good run, except for what is given."""
    combination = dataclasses.replace(PLAIN, front=front)
    case = Case(combination, Death(kind, chaos_cases.MOMENTS[kind][-1], 12, rank=1))
    stats = {"compressed_steps": 20, "so_far": {"backward_passes": chaos_cases.STEPS}}
    made = Outcome(case, died_in="training", died_at=12, resumed_at=10, survivors=[ERROR])
    made.final = [{"weights": WEIGHTS.clone(), "stats": stats} for _ in range(2)]
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("kind", "more"), [("one", {}), ("full", {"output": chaos_runs.FULL}), ("all", {})]
)
def test_a_good_run_fails_nothing(kind: str, more: dict[str, Any]) -> None:
    assert chaos_runs.judge(_outcome(kind, **more), WEIGHTS).failures == []
    assert (
        chaos_runs.judge(_outcome(kind, front="lightning", survivors=[], **more), WEIGHTS).failures
        == []
    )


BACK = "died at step 12, resumed at 5: further back than the last checkpoint"


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (_outcome(died_at=None), "the death did not take place"),
        (_outcome(resumed_at=None), "never resumed"),
        (_outcome(resumed_at=5), BACK),
        (_outcome(survivors=[]), "no other rank ended by itself"),
        (_outcome(survivors=[ERROR, ERROR | {"seconds": 26.0}]), "another rank ended 26 s later"),
        (_outcome("full"), "the reason, a full disk, was not given"),
        (_outcome("truncated"), "nothing was said of the damaged file"),
        (_outcome("truncated", message=chaos_runs.WITHOUT_RESIDUALS, resumed_at=5), BACK),
        (_outcome(final=[]), "no final weights"),
    ],
)
def test_each_broken_promise_is_a_failure(outcome: Outcome, text: str) -> None:
    assert chaos_runs.judge(outcome, WEIGHTS).failures == [text]


def test_other_weights_are_a_failure() -> None:
    other = "other weights than the training that was left alone"
    for output, more in (
        ("", ""),
        ("... marked inexact ...", " (a checkpoint was marked inexact)"),
    ):
        assert chaos_runs.judge(_outcome(output=output), WEIGHTS + 1e-7).failures == [other + more]
    different = _outcome()
    different.final[1]["weights"] += 1
    assert chaos_runs.judge(different, WEIGHTS).failures == ["the ranks ended in different weights"]
    short = _outcome()
    short.final[1]["stats"]["so_far"]["backward_passes"] -= 1
    assert chaos_runs.judge(short, WEIGHTS).failures == [
        f"not {chaos_cases.STEPS} steps, or none compressed"
    ]


def test_failures_of_machines_that_come_and_go_are_named() -> None:
    def machine(
        weights: str, taken: tuple[int, ...] = (1, 2), names: str = "ab", **more: Any
    ) -> Any:
        line = {"names": list(names), "progress": 9, "steps": 50, "share": 0.5} | more
        rounds = {step: {"weights": f"{weights} {step}"} | line for step in taken}
        return SimpleNamespace(
            lines=[{"what": "end", "step": 2, "loss": 0.5, "weights": weights}], rounds=rounds
        )

    for machines, text in (
        ([machine("x"), machine("x")], None),
        (
            [machine("x"), machine("y")],
            "other weights on other machines after the outer steps [1, 2]",
        ),
        (
            [machine("x"), machine("x", progress=8)],
            "other progress on other machines after the outer steps [1, 2]",
        ),
        ([machine("x", share=0.8), machine("x", steps=10, share=0.16)], None),
        ([machine("x"), machine("x", steps=None, share=0.0)], None),
        (
            [machine("x"), machine("x", steps=10)],
            "steps were not counted in the outer steps [1, 2]",
        ),
        ([machine("x"), machine("x"), machine("x")], "steps were not counted in the outer steps"),
        ([machine("x", (1,))], "nobody took the outer steps [2]"),
        ([machine("x", names="a")], "no two machines trained together"),
        ([], "no machine came to the end"),
    ):
        failures: list[str] = []
        chaos_members._result(machines, 2, failures)
        assert any(failure.startswith(text) for failure in failures) if text else failures == []


def test_a_machine_that_others_did_without_is_seen() -> None:
    """Though it was alive: `--busy`."""
    rounds = {}
    for step, names in enumerate(("a", "abc", "abc", "ac", "abc"), 1):
        line = {"weights": f"{step}", "progress": 9, "steps": None, "names": list(names)}
        rounds[step] = line | {"share": 0.0}
    machine: Any = SimpleNamespace(lines=[], rounds=rounds)
    assert chaos_members._result([machine], 5, [])["apart"] == [4]
