"""`matrix_approximation_rank` as ranks by globs on names."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks import HookConfigError, HookRunError, PowerSGD
from commhooks.compressors.hook_config import from_options
from commhooks.hook.plan_model import plan_model
from commhooks.hook.request import HookRequest
from tests.support.ddp_steps import log_lines, process_group_of_one, wrap
from tests.support.training import Run, residuals

START = {"start_powerSGD_iter": 1, "min_compression_rate": 1}
# The matrices of `training.make_model`: "0.weight" (12 x 9), "3.weight" (24 x 432), "5.weight", "7.weight".
BY_GLOB = {"3.*": 4, "[57].weight": 2}


def _options(ranks: Any) -> dict[str, Any]:
    return {"matrix_approximation_rank": ranks, **START}


def _ranks(hook: commhooks.CommHook) -> dict[str, int]:
    return {row.name: row.rank for row in hook.plan().compressed}  # type: ignore[attr-defined]


def _trained() -> dict[str, Any]:
    run = Run.new(hook_options=_options(BY_GLOB)).train(4)
    saved = run.hook.state_dict("per_rank")
    one = Run.new(hook_options=_options(2)).train(4)
    return {
        "ranks": _ranks(run.hook),
        "q": {name: entry["q"].shape[0] for name, entry in saved["parameters"].items() if entry["q"] is not None},
        "options": saved["options"],
        "reason": {row.name: row.reason for row in run.hook.plan().parameters}["0.weight"],
        "table": str(run.hook.plan()),
        "weights": run.weights(),
        "steps": run.hook.stats()["compressed_steps"],
        "as a number": torch.equal(
            one.weights(), Run.new(hook_options=_options({"nothing": 9, "*": 2, "3.*": 1})).train(4).weights()
        ),
    }


def test_each_matrix_has_its_rank(run_ranks: Any) -> None:
    ranks = run_ranks(_trained)
    for rank in ranks:
        assert rank["ranks"] == rank["q"] == {"3.weight": 4, "5.weight": 2, "7.weight": 2}
        assert rank["steps"] == 3 and torch.equal(rank["weights"], ranks[0]["weights"])
        assert rank["options"]["matrix_approximation_rank"] == BY_GLOB
        assert rank["reason"] == "no pattern of matrix_approximation_rank matches"
        assert "24 x 432" in rank["table"] and "no pattern" in rank["table"]
        assert rank["as a number"], "the first pattern that matches counts"


def _changed() -> dict[str, Any]:
    run = Run.new(hook_options=_options(2)).train(4)
    saved, before = run.save(residual="mean"), residuals(run.hook)
    again = Run.new(hook_options=_options({"3.*": 4, "*": 1})).load(saved)
    kept = residuals(again.hook)
    return {
        "kept": all(torch.equal(kept[name], before[name]) for name in before) and kept.keys() == before.keys(),
        "weights": again.train(3).weights(),
        "ranks": _ranks(again.hook),
    }


def test_a_change_between_runs_keeps_residuals(run_ranks: Any) -> None:
    ranks = run_ranks(_changed)
    for rank in ranks:
        assert rank["kept"] and rank["ranks"]["3.weight"] == 4 and rank["ranks"]["5.weight"] == 1
        assert torch.equal(rank["weights"], ranks[0]["weights"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words))


def test_a_tied_parameter_has_all_its_names_and_patterns_without_a_match_are_named() -> None:
    with process_group_of_one(), log_lines() as lines:
        hook = commhooks.attach(wrap(Tied()), PowerSGD(matrix_approximation_rank={"head*": 3, "*typo*": 9}))
        assert _ranks(hook) == {"embed.weight": 3}
    (warning,) = [line for line in lines if "matrix_approximation_rank" in line]
    assert "no parameter of the model matches '*typo*'" in warning and "head" not in warning.split("closest")[0]


def test_the_plan_of_a_model_without_ddp() -> None:
    request = HookRequest.parse("powerSGD", hook_options=_options({"embed*": 3}))
    plan = plan_model(Tied(), request)
    assert [row.details["rank"] for row in plan.compressed] == [3]
    assert plan.as_dict()["parameters"][0]["rank"] == 3


@pytest.mark.parametrize(
    "ranks",
    [{}, {"*": 0}, {"*": True}, {"": 1}, {"*": 1.5}, {1: 1}, {"*": None}, {"*": [1]}, [1], "four", {"*": "four"}],
)
def test_what_is_no_rank_is_refused(ranks: Any) -> None:
    for make in (lambda: PowerSGD(**_options(ranks)), lambda: from_options(PowerSGD, _options(ranks))):
        with pytest.raises(HookConfigError, match="matrix_approximation_rank"):
            make()


def test_text_in_numbers_by_glob_is_converted_as_yaml_does() -> None:
    made = from_options(PowerSGD, _options({"*": "4"}))
    assert made == PowerSGD(**_options({"*": 4})) and hash(made) == hash(PowerSGD(**_options(1)))
    assert pickle.loads(pickle.dumps(made)) == made


def test_whole_buckets_have_one_rank() -> None:
    with pytest.raises(HookConfigError, match="one number: whole buckets"):
        commhooks.BatchedPowerSGD(matrix_approximation_rank={"*": 2})


def test_the_callers_dict_is_copied() -> None:
    ranks = {"*": 2}
    made = PowerSGD(matrix_approximation_rank=ranks)
    ranks["*"] = 9
    assert made.matrix_approximation_rank == {"*": 2}


def _different() -> str:
    with pytest.raises(commhooks.AttachError) as caught:
        commhooks.attach(wrap(Tied()), PowerSGD(matrix_approximation_rank={"*": 1 + dist.get_rank()}))
    return str(caught.value)


def test_ranks_must_ask_for_the_same(run_ranks: Any) -> None:
    for text in run_ranks(_different):
        assert "{'*': 1}" in text and "{'*': 2}" in text


def test_a_bare_hook_knows_no_names() -> None:
    with process_group_of_one():
        state = commhooks.PowerSGDState(None, matrix_approximation_rank={"*": 2}, start_powerSGD_iter=0)
        ddp = wrap(Tied())
        ddp.register_comm_hook(state, commhooks.powerSGD_hook)
        with pytest.raises(HookRunError, match="matrix_approximation_rank=.* needs the names of parameters"):
            ddp(torch.arange(4)).sum().backward()
