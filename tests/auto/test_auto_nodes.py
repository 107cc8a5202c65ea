"""`auto` between nodes and on shards tries what is fast there, and all ranks decide alike."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.auto import trials
from commhooks.auto.compressor import AutoCompressor
from commhooks.auto.watch import ObservedPass
from commhooks.comm.collectives import PointToPoint
from commhooks.registry import register_compressor
from tests.support.ddp_steps import log_lines
from tests.support.inside import session_of
from tests.support.models import masks
from tests.support.prescribed_auto import (
    BEGIN,
    PrescribedAuto,
    PrescribedAutoCompressor,
    decision_of,
    new,
)
from tests.support.sharded import attached, backward, learned, random_gradients
from tests.support.training import Run, residuals

TRIAL_STEPS = 3
"""Of 0.1 s each, which is enough."""
TRIAL = trials.WARM_UP + TRIAL_STEPS
short_trials = mock.patch.object(trials, "TRIAL_STEPS", TRIAL_STEPS)
START = {
    "int8_compress": "start_iter",
    "int4_compress": "start_iter",
    "powerSGD": "start_powerSGD_iter",
}


def _on_an_accelerator(options: dict[str, Any], count: int) -> dict[str, Any]:
    """As on an accelerator: the host reads nothing, and gloo's collectives carry the messages."""
    with masks(), mock.patch.object(PointToPoint, "applies_to", return_value=False):
        return _as_by_name(options, count)


@short_trials
def _as_by_name(options: dict[str, Any], count: int) -> dict[str, Any]:
    """Also with bf16, which has no start: the gradients of the last step, with the same weights."""
    with log_lines("commhooks") as lines:
        run = new(ranks_per_node=2, **options).train(BEGIN + count * TRIAL + 1)
    chosen = decision_of(run).candidate
    start = {START[chosen.hook]: 2} if chosen.hook in START else {}
    by_name = Run.new(hook=chosen.hook, hook_options={**chosen.options, **start}, ranks_per_node=2)
    if start:
        by_name.train(run.step)
    else:
        # DDP then has the same buckets
        by_name.train(1).ddp.module.load_state_dict(run.ddp.module.state_dict())
        by_name.step = run.step
        run.train(1)
        by_name.train(1)
    session = session_of(run.hook)
    layouts = [bucket.layout for bucket in session.consensus.buckets if bucket.used]
    seen = ObservedPass(
        1.0, layouts, session.consensus.binding.names, session.listener._memory_plan
    )
    stats = run.hook.stats()
    stats_by_name = by_name.hook.stats()
    return {
        "label": chosen.label,
        "same": torch.equal(run.gradients[-1], by_name.gradients[-1]),
        "weights": run.weights(),
        "notes": run.hook.state_dict()["notes"],
        "residuals": (
            residuals(run.hook).keys() == (residuals(by_name.hook).keys() if start else set())
        ),
        "sent": [statistics["bytes_sent_last_pass"] for statistics in (stats, stats_by_name)],
        "inside": stats["bytes_inside_nodes"] > 0,
        "memory": seen.memory(session.compressor) == run.hook.plan().memory,  # as before a trial
        "plan": [
            dataclasses.replace(trained.hook.plan(), hook="", start_step=0)
            for trained in (run, by_name)
        ],
        "lines": [line for line in lines if "auto: " in line],
    }


@pytest.mark.parametrize(
    ("train", "options", "count", "label"),
    [
        (_as_by_name, {"quality": "low rank"}, 1, "powerSGD rank 2 between nodes"),
        (_on_an_accelerator, {"tried_s": 0.9}, 2, "bf16 between nodes"),
    ],
)
def test_between_nodes_the_chosen_hook_trains_as_if_named(
    run_ranks: Any, train: Callable[..., Any], options: dict[str, Any], count: int, label: str
) -> None:
    ranks = run_ranks(train, options, count, world_size=4)
    for rank in ranks:
        assert (
            rank["label"] == label
            and rank["same"]
            and rank["residuals"]
            and rank["inside"]
            and rank["memory"]
        )
        assert rank["sent"][0] == rank["sent"][1] and rank["plan"][0] == rank["plan"][1]
        assert rank["notes"] == ranks[0]["notes"] and torch.equal(
            rank["weights"], ranks[0]["weights"]
        )
    (line,) = ranks[0]["lines"]
    assert f"auto: {label} from step " in line and " per step and node: a step takes " in line


# What it is told, the machine of each rank, whether DDP looks for unused parameters, and whether
# there are nodes then.
ARRANGEMENTS = [
    (2, [0, 0, 0, 0], False, True),
    (None, [0, 1, 0, 1], False, True),  # it looks for machines itself
    (None, [0, 0, 0, 1], False, False),  # of different sizes
    (None, [0, 0, 1, 1], True, False),
    (1, [0, 0, 1, 1], False, False),
]


def _offered() -> list[tuple[set[str], int]]:
    """Return the measured candidates and the saved ranks per node of each arrangement."""
    register_compressor(PrescribedAutoCompressor)
    results = []
    for ranks_per_node, machines, unused, _ in ARRANGEMENTS:
        with mock.patch.dict(os.environ, GROUP_RANK=str(machines[dist.get_rank()])):
            auto = PrescribedAuto(quality="close")
            ddp = {"find_unused_parameters": unused}
            run = Run.new(hook=auto, ranks_per_node=ranks_per_node, ddp=ddp).train(BEGIN + 1)
        assert decision_of(run).phase == "trying"
        results.append(
            (
                set(decision_of(run).candidates),
                run.hook.state_dict()["notes"].get("ranks_per_node", 1),
            )
        )
    return results


def test_candidates_compress_between_nodes_if_there_are_several(run_ranks: Any) -> None:
    labels = ("bf16", "int8", "int4", "powerSGD rank 16")
    for rank in run_ranks(_offered, world_size=4):
        for (labels_known, ranks_per_node), (*_, nodes) in zip(rank, ARRANGEMENTS, strict=True):
            assert labels_known == {
                "allreduce",
                *(f"{name}{' between nodes' if nodes else ''}" for name in labels),
            }
            assert ranks_per_node == (2 if nodes else 1)


@short_trials
def _saved_while(steps: int) -> dict[str, Any]:
    options: dict[str, Any] = {"quality": "low rank", "ranks_per_node": 2}
    run = new(**options).train(steps)
    saved = run.save(residual="mean")
    again = new(**options).load(saved)
    decisions = [decision_of(trained) for trained in (run, again)]
    for trained in (run, again):
        trained.train(3)
    flat = new(**options | {"ranks_per_node": 1}).load(saved)
    return {
        "exact": saved["hook"]["exact"],
        "phase": decisions[0].phase,
        "decisions": decisions[0].to_plain() == decisions[1].to_plain(),
        "after": decision_of(run).to_plain() == decision_of(again).to_plain(),
        "weights": [run.weights(), again.weights()],
        "flat": (
            decision_of(flat).candidate.label,
            decision_of(flat).since,
            len(residuals(flat.hook)),
        ),
        "trains": flat.train(3).weights(),
        "saved": saved,
    }


def _with_more_nodes(saved: dict[str, Any]) -> tuple[str, str, torch.Tensor]:
    run = new(measure_steps=4, ranks_per_node=2, quality="low rank").load(saved)
    label = decision_of(run).candidate.label
    phase = decision_of(run).phase
    return label, phase, run.train(3).weights()


def test_between_nodes_a_run_resumes(run_ranks: Any) -> None:
    ranks = run_ranks(_saved_while, BEGIN + TRIAL + 1, world_size=4)
    for rank in ranks:
        assert rank["exact"] and rank["phase"] == "decided" and rank["decisions"] and rank["after"]
        assert torch.equal(*rank["weights"])
        # Without nodes nothing of that is possible: it begins anew.
        assert rank["flat"] == ("allreduce", None, 0) and torch.equal(
            rank["trains"], ranks[0]["trains"]
        )
    more = run_ranks(_with_more_nodes, ranks[0]["saved"], world_size=6)
    for label, anew, weights in more:
        assert (label, anew) == ("powerSGD rank 2 between nodes", "measuring")
        assert torch.equal(weights, more[0][2])


# ---- FSDP2 ---------------------------------------------------------------------------------------


def _decision(hook: commhooks.CommHook) -> Any:
    compressor = session_of(hook).compressor
    assert isinstance(compressor, AutoCompressor)
    return compressor.decision


def _on_shards() -> dict[str, Any]:
    register_compressor(PrescribedAutoCompressor)
    steps = BEGIN + 3
    model, hook = attached(2, 2, PrescribedAuto())
    by_name, _ = attached(2, 2, "int8", hook_options={"start_iter": BEGIN})
    same = []
    for step in range(steps):
        got, wanted = (backward(trained, random_gradients(step)) for trained in (model, by_name))
        same.append(all(torch.equal(got[name], wanted[name]) for name in wanted))
    saved = hook.state_dict()
    loaded, again = attached(2, 2, PrescribedAuto())
    again.load_state_dict(saved)
    one, other = backward(model, random_gradients(steps)), backward(loaded, random_gradients(steps))
    return {
        "same": all(same),
        "learned": all(
            torch.equal(learned(hook)[key], tensor) for key, tensor in learned(again).items()
        ),
        "resumed": all(torch.equal(one[name], other[name]) for name in one),
        "decisions": [_decision(decider).to_plain() for decider in (hook, again)],
        "bytes": hook.plan().bytes_after + hook.plan().flag_bytes,
    }


def test_on_shards_the_choice_trains_as_by_name_and_resumes(run_ranks: Any) -> None:
    ranks = run_ranks(_on_shards, world_size=4)
    for rank in ranks:
        assert rank["same"] and rank["resumed"] and rank["learned"]
        assert rank["decisions"][0] == rank["decisions"][1] == ranks[0]["decisions"][0]
        assert rank["decisions"][0]["label"] == "int8"
    # The shards differ in size, and count with the larger one.
    assert ranks[0]["decisions"][0]["figures"]["counted_bytes"]["int8"] == max(
        rank["bytes"] for rank in ranks
    )
    assert len({rank["bytes"] for rank in ranks}) == 2


@short_trials
def _one_shard_is_slow() -> dict[str, Any]:
    """What the ranks of one shard measure counts for all."""
    register_compressor(PrescribedAutoCompressor)
    model, hook = attached(2, 2, PrescribedAuto(bf16_s=None))
    compressor = session_of(hook).compressor
    assert isinstance(compressor, AutoCompressor)
    if dist.get_rank() % 2:
        object.__setattr__(compressor.config, "tried_s", 3.0)
    for step in range(BEGIN + TRIAL + 1):
        backward(model, random_gradients(step))
    return _decision(hook).to_plain()


def test_the_slowest_shard_counts(run_ranks: Any) -> None:
    for notes in run_ranks(_one_shard_is_slow, world_size=4):
        assert notes["label"] == "allreduce" and notes["figures"]["tried_s"] == {
            "allreduce": 1.0,
            "int8": 3.0,
        }
