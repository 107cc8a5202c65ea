"""A payload in a shared part and parts of ranks: nothing is lost, and what does not belong together
is found out.
"""

import copy
import io
import re
from typing import Any

import pytest
import torch

from commhooks import PayloadError
from commhooks.checkpoint.parts import (
    check_shared,
    merge,
    problem_of_part,
    ranks_needed,
    save_id,
    split,
)
from commhooks.comm.counters import CONTINUED
from tests.support.models import same


def made(rank: int, world_size: int = 2, **changes: Any) -> dict[str, Any]:
    """What `state_dict()` returns on `rank`: residuals filled with 1 + rank; the bias has none."""
    q = torch.arange(6, dtype=torch.float32).view(2, 3)
    residual = torch.full((4, 3), 1.0 + rank)
    saved: dict[str, Any] = {
        "format": "commhooks",
        "version": 1,
        "hook": "powerSGD",
        "options": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3},
        "step": 7,
        "nonfinite_steps": 0,
        "counters": dict.fromkeys(CONTINUED, 0),
        "world_size": world_size,
        "loss_scale": 1.0,
        "exact": True,
        "residual": "per_rank",
        "residual_ranks": [rank],
        "parameters": {
            "weight": {"shape": [4, 3], "row_dim": 0, "q": q, "residual": [residual]},
            "bias": {"shape": [4], "row_dim": 0, "q": None, "residual": None},
        },
        "batched_q": {},
        "hook_state": None,
    }
    return saved | changes


def through_a_file(content: dict[str, Any] | None) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def parts_of(world_size: int) -> tuple[dict[str, Any], list[Any]]:
    split_up = [split(made(rank, world_size), rank) for rank in range(world_size)]
    assert all(same(shared, split_up[0][0]) for shared, _ in split_up)  # the same on every rank
    return check_shared(through_a_file(split_up[0][0])), [
        through_a_file(part) for _, part in split_up
    ]


def test_split_and_merge_is_what_was_saved() -> None:
    shared, parts = parts_of(2)
    for rank in range(2):
        assert ranks_needed(shared, rank, 2) == [rank]
        assert problem_of_part(shared, parts[rank], rank) is None
        assert same(merge(shared, [parts[rank]], rank, 2), made(rank))


def test_the_residual_is_in_the_part_only() -> None:
    saved = made(1)
    before = copy.deepcopy(saved)
    shared, part = split(saved, 1)
    assert same(saved, before)
    assert part is not None and set(part["residuals"]) == {"weight"}
    assert (
        shared["parameters"]["weight"]["residual"] == []
        and shared["parameters"]["bias"]["residual"] is None
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_size_takes_the_mean(world_size: int) -> None:
    shared, parts = parts_of(2)
    assert ranks_needed(shared, 0, world_size) == [0, 1]
    merged = merge(shared, iter(parts), 0, world_size)
    assert merged["residual"] == "mean" and merged["residual_ranks"] == [0, 1]
    assert torch.equal(merged["parameters"]["weight"]["residual"], torch.full((4, 3), 1.5))
    assert merged["parameters"]["bias"]["residual"] is None


def test_a_rank_without_an_entry_has_zeros_there() -> None:
    shared, parts = parts_of(2)
    parts[1]["residuals"].clear()
    merged = merge(shared, parts, 0, 1)
    assert torch.equal(merged["parameters"]["weight"]["residual"], torch.full((4, 3), 0.5))
    assert merge(shared, [parts[1]], 1, 2)["parameters"]["weight"]["residual"] is None


@pytest.mark.parametrize("parts", [[None], [None, None]])
def test_a_missing_part_leaves_residuals_that_are_nowhere(parts: list[None]) -> None:
    shared, _ = parts_of(2)
    merged = merge(shared, parts, 0, 2 if len(parts) == 1 else 3)
    assert merged["residual"] == "per_rank" and merged["residual_ranks"] == []
    assert merged["parameters"]["weight"]["residual"] == []


def test_means_and_nothing_need_no_parts() -> None:
    mean = made(0, residual="mean", residual_ranks=[0, 1])
    mean["parameters"]["weight"]["residual"] = torch.ones(4, 3)
    early = made(0)
    early["parameters"]["weight"]["residual"] = None
    for saved in (mean, early):
        shared, part = split(saved, 0)
        assert part is None
        assert ranks_needed(shared, 0, 2) == ranks_needed(shared, 0, 3) == []
        assert merge(shared, [], 0, 3).keys() == saved.keys()


def test_only_the_residuals_of_one_rank_can_be_split() -> None:
    with pytest.raises(ValueError, match="expected the residuals of rank 0 only"):
        split(made(1), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 8},
        {"hook": "batched_powerSGD"},
        {"options": {"matrix_approximation_rank": 2, "start_powerSGD_iter": 4}},
        {"loss_scale": 2.0},
        {"world_size": 3},
        {"batched_q": {"batched.0": torch.ones(1, 2)}},
    ],
)
def test_the_fingerprint_is_of_what_all_ranks_share(changes: dict[str, Any]) -> None:
    assert save_id(made(0)) == save_id(made(1))
    assert save_id(made(0)) != save_id(made(0) | changes)


def test_the_fingerprint_sees_every_number_of_q() -> None:
    saved = made(0)
    saved["parameters"]["weight"]["q"] = saved["parameters"]["weight"]["q"].clone()
    saved["parameters"]["weight"]["q"][1, 2] += 1e-6
    assert save_id(saved) != save_id(made(0))
    # Where the numbers lie in memory does not matter.
    saved["parameters"]["weight"]["q"] = made(0)["parameters"]["weight"]["q"].t().contiguous().t()
    assert save_id(saved) == save_id(made(0))


def test_the_fingerprint_stays_what_it_is() -> None:
    """Written into checkpoints: another value would make every older residual count as stale."""
    assert save_id(made(0)) == "08e1922381047925b340a051686ac234641b710402fc5fd96e66474d8992d2f3"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "commhooks"}, "is not the part of one rank"),
        ({"version": 2}, "is not the part of one rank"),
        ({"fingerprint": "0"}, "is of another save"),
        ({"rank": 0}, "is of rank 0, not of rank 1"),
        ({"residuals": None}, "has no residuals"),
        ({"residuals": {"weight": None}}, "has a residual for 'weight' that does not fit"),
        ({"residuals": {"weight": [0.0]}}, "has a residual for 'weight' that does not fit"),
        (
            {"residuals": {"weight": torch.ones(3, 4)}},
            "has a residual for 'weight' that does not fit",
        ),
        (
            {"residuals": {"weight": torch.ones(4, 3).long()}},
            "has a residual for 'weight' that does not fit",
        ),
        (
            {"residuals": {"other": torch.ones(4, 3)}},
            "has a residual for 'other' that does not fit",
        ),
        (
            {"residuals": {"weight": torch.full((4, 3), float("nan"))}},
            "for 'weight' that does not fit .*inf or NaN",
        ),
        (
            {"residuals": {"weight": torch.ones(1).expand(4, 3)}},
            "for 'weight' that does not fit .*more elements",
        ),
    ],
)
def test_parts_that_do_not_belong(changes: dict[str, Any], problem: str) -> None:
    shared, parts = parts_of(2)
    assert re.search(problem, str(problem_of_part(shared, parts[1] | changes, 1)))
    assert "is not the part of one rank" in str(problem_of_part(shared, None, 1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": 8}, "its content and its fingerprint"),
        ({"parameters": {"weight": {}}}, "'weight'.* has no 'shape'"),
        ({"parameters": []}, "'parameters' is not a dict"),
        ({"batched_q": {"a": 1}}, "batched_q has a key 'a'"),
        ({"world_size": 2**40}, "'world_size' is 1099511627776"),
        ({"fingerprint": None}, "its content and its fingerprint"),
        ({"version": 2}, "has format version 2"),
        ({"format": "x"}, "not the state of a commhooks hook"),
    ],
)
def test_damaged_shared_parts(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        check_shared(parts_of(2)[0] | changes)


def test_the_state_of_a_hook_of_ones_own_is_of_each_rank() -> None:
    own = {
        "format": "commhooks",
        "version": 1,
        "hook": "mine",
        "options": {},
        "step": 3,
        "world_size": 2,
    }
    split_up = [split(own | {"hook_state": {"rank": rank}}, rank) for rank in range(2)]
    shared, part = split_up[0][0], split_up[1][1]
    assert problem_of_part(shared, part, 1) is None
    assert ranks_needed(shared, 1, 2) == [1] and ranks_needed(shared, 1, 3) == []
    assert merge(shared, [part], 1, 2)["hook_state"] == {"rank": 1}
    assert merge(shared, [None], 1, 2)["hook_state"] == {"rank": 0}
    assert merge(shared, [], 1, 3)["hook_state"] == {"rank": 0}
    assert split(own | {"hook_state": None}, 0)[1] is None


def test_no_numpy_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    assert save_id(made(0))


def test_parts_of_another_run_at_the_same_step_do_not_belong() -> None:
    """Without factors, as of int8, nothing else tells them apart."""
    saved = made(1)
    saved["parameters"]["weight"]["q"] = None
    shared, part = split(saved, 1, run=1)
    assert problem_of_part(check_shared(through_a_file(shared)), through_a_file(part), 1) is None
    _, other = split(saved, 1, run=2)
    assert "is of another save" in str(problem_of_part(shared, other, 1))
    assert "run" not in merge(shared, [part], 1, 2)
