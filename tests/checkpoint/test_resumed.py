"""A resume says where it goes on, its counters go on too, and the plan names the bytes of what is
saved.
"""

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks import PayloadError
from tests.support.ddp_steps import log_lines
from tests.support.training import Run

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}


def _resumed(saved: dict[str, Any], hook: str = "powerSGD", **attach: Any) -> tuple[Run, list[str]]:
    with log_lines("commhooks.summary", logging.INFO) as lines:
        run = Run.new(hook=hook, **attach).load(saved)
    return run, lines


def _lines() -> dict[str, list[str]]:
    run = Run.new(hook_options=OPTIONS)
    start = run.save(residual="mean")
    plain = run.train(2).save(residual="mean")
    run.train(3)
    saved = {
        how: run.save(residual=how, gather=how == "per_rank")
        for how in ("per_rank", "mean", "drop")
    }
    simple = Run.new(hook="bf16").train(2).save()
    found = {how: _resumed(content, hook_options=OPTIONS)[1] for how, content in saved.items()}
    found |= {
        "start": _resumed(start, hook_options=OPTIONS)[1],
        "plain": _resumed(plain, hook_options=OPTIONS)[1],
    }
    nothing = {"exclude": ["*"]}
    without = Run.new(hook="int8", hook_options=nothing).train(2).save(residual="mean")
    found["without"] = _resumed(without, "int8", hook_options=nothing)[1]
    return found | {"bf16": _resumed(simple, "bf16")[1]}


def test_the_line_says_where_it_goes_on(run_ranks: Any) -> None:
    first, other = run_ranks(_lines)
    assert first == {
        "per_rank": ["commhooks: powerSGD resumed at step 5; residuals: each rank's own"],
        "mean": ["commhooks: powerSGD resumed at step 5; residuals: mean of 2 ranks"],
        "drop": ["commhooks: powerSGD resumed at step 5; residuals: none, they start from zero"],
        "start": [],
        "plain": ["commhooks: powerSGD resumed at step 2; not yet compressing"],
        "bf16": ["commhooks: bf16_compress resumed at step 2"],
        "without": ["commhooks: int8_compress resumed at step 2; no parameter has a residual"],
    }
    assert not any(other.values())


def _saved_at(step: int) -> dict[str, Any]:
    return Run.new(hook_options=OPTIONS).train(step).save(residual="per_rank", gather=True)


def _loaded(saved: dict[str, Any]) -> list[str]:
    return _resumed(saved, hook_options=OPTIONS)[1]


def test_another_number_of_ranks_is_named(run_ranks: Any) -> None:
    saved = run_ranks(_saved_at, 4)[0]
    ((line,),) = run_ranks(_loaded, saved, world_size=1)
    assert line == "commhooks: powerSGD resumed at step 4; residuals: mean of 2 ranks"
    saved = run_ranks(_saved_at, 2)[0]
    ((line,),) = run_ranks(_loaded, saved, world_size=1)
    assert line == "commhooks: powerSGD resumed at step 2; not yet compressing"


def _other_starts() -> dict[str, list[str]]:
    run, starts = Run.new(hook_options=OPTIONS).train(2), (3, 4, 0)
    early, late = run.save(), run.train(2).save()
    found = {}
    for name, saved in (("early", early), ("late", late)):
        for start in starts:
            again, found[f"{name}, {start}"] = _resumed(
                saved, hook_options=OPTIONS | {"start_powerSGD_iter": start}
            )
            assert again.hook.options["start_powerSGD_iter"] == 3
    return found


def test_an_overruled_start_is_told_while_it_matters(run_ranks: Any) -> None:
    found = {name: line for name, (line,) in run_ranks(_other_starts)[0].items()}
    told = {name for name, line in found.items() if "start_powerSGD_iter=" in line}
    # at step 4 the saved start is behind, and so is the other
    assert told == {
        "early, 4",
        "early, 0",
    }
    assert found["early, 4"].endswith("; start_powerSGD_iter=3 as it was saved, not 4")


# ---- counters
# --------------------------------------------------------------------------------------------------


def _counted(hook: str) -> dict[str, Any]:
    options = {"hook_options": OPTIONS} if hook == "powerSGD" else {}
    through = Run.new(hook=hook, **options).train(5)
    saved = through.save()
    through.train(3)
    again, _ = _resumed(saved, hook, **options)
    loaded = again.hook.stats()["so_far"]
    again.train(3)
    stats = again.hook.stats()
    rewound = again.load(saved).hook.stats()["so_far"]
    return {
        "saved": saved["hook"]["counters"],
        "loaded": loaded,
        "rewound": rewound,
        "through": through.hook.stats()["so_far"],
        "again": stats["so_far"],
        "own": {name: stats[name] for name in stats["so_far"]},
    }


@pytest.mark.parametrize("hook", ["powerSGD", "bf16"])
def test_what_was_counted_goes_on(run_ranks: Any, hook: str) -> None:
    for rank in run_ranks(_counted, hook):
        assert rank["again"] == rank["through"] and rank["again"]["backward_passes"] == 8
        assert rank["own"]["backward_passes"] == 3  # `stats()` itself counts from `attach`
        known = {name: count for name, count in rank["loaded"].items() if count is not None}
        assert known and known == {name: rank["saved"][name] for name in known}
        assert rank["rewound"] == rank["loaded"]
        assert rank["saved"]["bytes_sent"] > 0 and rank["saved"]["backward_passes"] == 5


def _damaged() -> dict[str, Any]:
    saved = Run.new(hook_options=OPTIONS).train(5).save()
    run, counted = _resumed(saved, hook_options=OPTIONS)[0], saved["hook"]["counters"]
    errors = []
    wrong = [counted | {"bytes_sent": value} for value in (-1, True, torch.tensor(1))]
    for counters in (None, [], {}, *wrong):
        with pytest.raises(PayloadError) as caught:
            run.hook.load_state_dict(saved["hook"] | {"counters": counters})
        errors.append(str(caught.value))
    return {"so_far": run.train(1).hook.stats()["so_far"], "errors": errors}


def test_damaged_counters_change_nothing(run_ranks: Any) -> None:
    for rank in run_ranks(_damaged):
        assert rank["so_far"]["backward_passes"] == 6
        assert all(text.startswith("damaged hook state: ") for text in rank["errors"])


# ---- the plan
# --------------------------------------------------------------------------------------------------


def _sizes(save_residual: str) -> tuple[int, int, str]:
    """Bytes of the residuals that this rank saves, and what the plan says of all."""
    run = Run.new(hook_options=OPTIONS, save_residual=save_residual).train(4)
    residuals = [entry["residual"] for entry in run.save()["hook"]["parameters"].values()]
    tensors = [
        each[0] if isinstance(each, list) else each for each in residuals if each is not None
    ]
    plan = run.hook.plan()
    with mock.patch("commhooks.plan.NAMED_SAVE_BYTES", 1):
        return sum(each.nbytes for each in tensors), plan.saved_residuals, f"{plan}{plan.summary()}"


@pytest.mark.parametrize("save_residual", ["per_rank", "mean", "drop"])
def test_the_plan_names_the_bytes_of_residuals_in_a_checkpoint(
    run_ranks: Any, save_residual: str
) -> None:
    ranks = run_ranks(_sizes, save_residual)
    written = sum(size for size, *_ in ranks) if save_residual == "per_rank" else ranks[0][0]
    for _, planned, text in ranks:
        assert planned == written and bool(written) == (save_residual != "drop")
        assert ("Residuals in a checkpoint of all ranks: " in text) == bool(written)
        assert ("0.0 GB of residuals in a checkpoint of all ranks" in text) == bool(written)
