"""A save that is not exact keeps one reason, the true one, and the load says it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import commhooks
from commhooks.checkpoint.distributed import from_distributed
from commhooks.request import HookRequest
from tests.support.ddp_steps import log_lines
from tests.support.training import Run

LOST = (
    "It is loaded without residuals, so the run resumes from residuals of zero; step and Q are"
    " kept."
)
OTHERWISE = "The run does not go on exactly as the run that saved it."


def _alone(hook: commhooks.CommHook) -> Any:
    """Rank 0 saves what all ranks should save together."""
    hook.joint_save_limit_s = 0.2
    saved = hook.state_dict("mean") if dist.get_rank() == 0 else None
    dist.barrier()
    return saved


INT8, DILOCO = ("int8", {"start_iter": 1}), ("diloco", {"sync_every": 4})
CASES: dict[
    str, tuple[tuple[str, dict[str, Any]], Callable[[commhooks.CommHook], Any], str, str]
] = {
    "not together": (
        INT8,
        lambda hook: hook.state_dict("mean", joint=False),
        "rank 0 saved on its own",
        LOST,
    ),
    "late": (INT8, _alone, "not every rank took part within 0.2 s", LOST),
    "distributed, in mid-round": (
        DILOCO,
        lambda hook: hook.state_dict("distributed"),
        (
            "the save has ended a round: copies of the model's or an optimizer's state that were"
            " made before it (cpu_offload=True) are older than the hook's state"
        ),
        LOST,
    ),
    "alone, in mid-round": (  # of the first round, which has left no residuals yet
        DILOCO,
        lambda hook: hook.state_dict("mean", joint=False),
        "rank 0 saved on its own, in the middle of a round",
        OTHERWISE,
    ),
    "late, in mid-round": (
        DILOCO,
        _alone,
        "the ranks could not average their weights: not every rank took part within 0.2 s",
        OTHERWISE,
    ),
    "own residuals, alone, in mid-round": (
        DILOCO,
        lambda hook: hook.state_dict("per_rank", joint=False),
        "rank 0 saved on its own, in the middle of a round",
        OTHERWISE,
    ),
    "local SGD, alone, in mid-round": (
        ("local_sgd", {"sync_every": 4}),
        lambda hook: hook.state_dict("mean", joint=False),
        "rank 0 saved on its own, in the middle of a round",
        OTHERWISE,
    ),
}


def _saved_and_loaded(case: str) -> tuple[Any, list[str]] | None:
    """The reason in rank 0's payload, and what rank 0 logs when it loads it."""
    (hook, options), save, _, _ = CASES[case]
    run = Run.new(hook=hook, hook_options=options).train(2)
    saved = save(run.hook)
    new = Run.new(hook=hook, hook_options=options)
    if dist.get_rank() != 0:
        return None
    with log_lines("commhooks.checkpoint", logging.WARNING) as lines:
        new.hook.prepare_load(saved)
    content = from_distributed(saved, new.hook._source) if "commhooks" in saved else saved
    return content["inexact_because"], lines


@pytest.mark.parametrize("case", CASES)
def test_the_load_says_why_the_save_was_not_exact(run_ranks: Any, case: str) -> None:
    (hook, _), _, reason, then = CASES[case]
    (kept, lines), _ = run_ranks(_saved_and_loaded, case)
    name = HookRequest.parse(hook).name
    assert kept == reason
    assert lines == [
        f"commhooks: the saved state of hook {name} is marked inexact, because {reason}. {then}"
    ]


def _older_and_damaged() -> tuple[list[str], str, list[str]]:
    hook = Run.new(hook="int8", hook_options={"start_iter": 1}).train(2).hook
    saved = hook.state_dict("mean", joint=False)
    with log_lines("commhooks.checkpoint", logging.WARNING) as of_older:
        hook.prepare_load({key: value for key, value in saved.items() if key != "inexact_because"})
    with pytest.raises(commhooks.PayloadError) as error:
        hook.prepare_load(saved | {"inexact_because": 3})
    with log_lines("commhooks.checkpoint", logging.WARNING) as of_hostile:
        hook.prepare_load(saved | {"inexact_because": "a\x1b[2J\n" + 1000 * "b"})
    return of_older, str(error.value), of_hostile


def test_an_older_payload_loads_and_a_damaged_reason_does_no_harm(run_ranks: Any) -> None:
    (of_older, damaged, (of_hostile,)), _ = run_ranks(_older_and_damaged)
    assert of_older == [
        f"commhooks: the saved state of hook int8_compress is marked inexact. {LOST}"
    ]
    assert damaged == "damaged hook state: 'inexact_because' is 3, not a text"
    assert of_hostile.isprintable() and len(of_hostile) < 700
