"""A save or a load in which something is missing: it says so, and all ranks go on alike."""

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import PayloadError
from commhooks.checkpoint.distributed import from_distributed
from commhooks.engine.backward_pass import BackwardPass, RunningExchange
from commhooks.request import HookRequest
from tests.support.ddp_steps import log_lines
from tests.support.inside import session_of
from tests.support.training import Run, make_model

OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
FROM_STEP_0 = {"start_powerSGD_iter": 0}

# ---- the reason

LOST = (
    "It is loaded without residuals, so the run resumes from residuals of zero; step and Q are"
    " kept."
)
OTHERWISE = "The run does not go on exactly as the run that saved it."


def _alone(hook: commhooks.CommHook) -> Any:
    """Save on rank 0 alone what all ranks should save together."""
    hook.joint_save_limit_s = 0.2
    saved = hook.state_dict("mean") if dist.get_rank() == 0 else None
    dist.barrier()
    return saved


INT8 = ("int8", {"start_iter": 1})
DILOCO = ("diloco", {"sync_every": 4})
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
    """Return the reason in the payload of rank 0, and what rank 0 logs when it loads it."""
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
    (saved_reason, lines), _ = run_ranks(_saved_and_loaded, case)
    name = HookRequest.parse(hook).name
    assert saved_reason == reason
    assert lines == [
        f"commhooks: the saved state of hook {name} is marked inexact, because {reason}. {then}"
    ]


def _without_a_reason_and_damaged() -> tuple[list[str], str, list[str]]:
    hook = Run.new(hook="int8", hook_options={"start_iter": 1}).train(2).hook
    saved = hook.state_dict("mean", joint=False)
    with log_lines("commhooks.checkpoint", logging.WARNING) as of_older:
        hook.prepare_load({key: value for key, value in saved.items() if key != "inexact_because"})
    with pytest.raises(PayloadError) as error:
        hook.prepare_load(saved | {"inexact_because": 3})
    with log_lines("commhooks.checkpoint", logging.WARNING) as of_hostile:
        hook.prepare_load(saved | {"inexact_because": "a\x1b[2J\n" + 1000 * "b"})
    return of_older, str(error.value), of_hostile


def test_an_older_payload_without_a_reason_loads_and_a_damaged_reason_does_no_harm(
    run_ranks: Any,
) -> None:
    (of_older, damaged, (of_hostile,)), _ = run_ranks(_without_a_reason_and_damaged)
    assert of_older == [
        f"commhooks: the saved state of hook int8_compress is marked inexact. {LOST}"
    ]
    assert damaged == "damaged hook state: 'inexact_because' is 3, not a text"
    assert of_hostile.isprintable() and len(of_hostile) < 700


# ---- the residuals of some ranks are missing


def _make_inexact(payload: dict[str, Any]) -> None:
    payload.update(residual="none", residual_ranks=[], exact=False)
    for entry in payload["parameters"].values():
        entry["residual"] = None


def _resumed(saved: dict[str, Any]) -> torch.Tensor:
    run = Run.new(hook_options=OPTIONS).load(saved)
    assert run.hook.stats()["step"] == 5
    return run.train(3).weights()


def _with_missing_residuals() -> dict[str, torch.Tensor]:
    """Return the weights after a resume: without residuals, and where those of one rank miss."""
    run = Run.new(hook_options=OPTIONS).train(5)
    saved = run.save()
    of_rank_0 = [saved]
    dist.broadcast_object_list(of_rank_0, 0)
    assert of_rank_0[0]["hook"]["residual_ranks"] == [0]
    inexact_on_rank_1 = copy.deepcopy(saved)
    if dist.get_rank() == 1:
        _make_inexact(inexact_on_rank_1["hook"])
    return {
        "no residuals": _resumed(run.save(residual="drop")),
        "inexact on rank 1": _resumed(inexact_on_rank_1),
        "only the file of rank 0": _resumed(of_rank_0[0]),
        "all residuals": _resumed(saved),
    }


def test_all_ranks_resume_without_residuals_if_one_rank_has_none(run_ranks: Any) -> None:
    ranks = run_ranks(_with_missing_residuals)
    expected = ranks[0]["no residuals"]
    for weights in ranks:
        assert torch.equal(weights["inexact on rank 1"], expected)
        assert torch.equal(weights["only the file of rank 0"], expected)
        assert not torch.equal(weights["all residuals"], expected)


# ---- a commit or a save that failed on one rank


def _failed_on_rank_1() -> tuple[str, bool, list[str]]:
    """Fail the commit of rank 1; then save the mean on all ranks, twice."""
    run = Run.new(hook_options=OPTIONS).train(3)
    run.hook.joint_save_limit_s = 1000.0  # longer than the test may take
    if dist.get_rank() == 1:
        failing = mock.Mock(side_effect=MemoryError)
        with mock.patch.object(BackwardPass, "commit", failing), pytest.raises(MemoryError):
            run.train(1)
    else:
        run.train(1)
    with log_lines("commhooks", logging.WARNING) as lines:
        first, second = (run.hook.state_dict("mean") for _ in range(2))
    return second["residual"], first["exact"], lines


def test_no_rank_waits_for_a_rank_whose_commit_failed(run_ranks: Any) -> None:
    for rank, (residual, exact, lines) in enumerate(run_ranks(_failed_on_rank_1)):
        assert residual == "none" and not exact
        assert len(lines) == (2 if rank == 1 else 0)
        assert all("rank 1 has lost its residuals" in line for line in lines)


def _declined_before_a_step() -> list[tuple[str, bool]]:
    """Load a payload without residuals on rank 1, which declines the next joint save only."""
    run = Run.new(hook_options=OPTIONS).train(3)
    run.hook.joint_save_limit_s = 60.0
    payload = run.hook.state_dict("per_rank", gather=False)
    if dist.get_rank() == 1:
        _make_inexact(payload)
    run.hook.load_state_dict(payload)
    declined = run.hook.state_dict("mean")
    joint = run.train(1).hook.state_dict("mean")
    return [(saved["residual"], saved["exact"]) for saved in (declined, joint)]


def test_a_rank_that_declined_a_joint_save_takes_part_in_the_next_one(run_ranks: Any) -> None:
    for declined, joint in run_ranks(_declined_before_a_step):
        assert declined == ("none", False) and joint[0] == "mean"


def _alone_without_a_residual() -> tuple[str, bool]:
    """Save on rank 1 alone while it has no residuals, and then load some."""
    run = Run.new(hook_options=OPTIONS).train(3)
    run.hook.joint_save_limit_s = 60.0
    payload = run.hook.state_dict("per_rank", gather=False)
    if dist.get_rank() == 1:
        without = copy.deepcopy(payload)
        _make_inexact(without)
        run.hook.load_state_dict(without)
        assert run.hook.state_dict("mean", joint=False)["residual"] == "none"
    run.hook.load_state_dict(payload)
    saved = run.hook.state_dict("mean")
    return saved["residual"], saved["exact"]


def test_a_save_of_one_rank_alone_does_not_decline_a_joint_save(run_ranks: Any) -> None:
    assert run_ranks(_alone_without_a_residual) == [("mean", True)] * 2


def _wrapped_again(model: torch.nn.Module, state: commhooks.PowerSGDState) -> Run:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    return Run(ddp, optimizer, commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state))


def _after_a_failed_commit() -> dict[str, Any]:
    """Fail a commit in the third bucket, and go on with the same state in a new DDP wrapper."""
    state = commhooks.PowerSGDState(None, 2, 1)
    run = _wrapped_again(make_model(), state).train(3)
    advance = RunningExchange.advance
    verdicts = 0

    def failing(self: RunningExchange, verdict: Any = None) -> None:
        nonlocal verdicts
        verdicts += isinstance(verdict, bool)
        if verdicts == 3:
            raise MemoryError
        advance(self, verdict)

    with mock.patch.object(RunningExchange, "advance", failing), pytest.raises(MemoryError):
        run.train(1)
    failed = run.hook.state_dict("per_rank")
    module = run.ddp.module
    del run
    gc.collect()  # the old wrapper has hooks on the parameters
    run = _wrapped_again(module, state).train(2)
    saved = copy.deepcopy(run.save())
    run.train(3)
    resumed = (
        _wrapped_again(make_model(), commhooks.PowerSGDState(None, 2, 900)).load(saved).train(3)
    )
    return {
        "failed": (failed["residual"], failed["exact"], failed["step"]),
        "later": (saved["hook"]["residual"], saved["hook"]["exact"], saved["hook"]["step"]),
        "weights": run.weights(),
        "resumed": resumed.weights(),
    }


def test_the_commits_after_a_failed_one_can_be_saved_and_resumed_exactly(run_ranks: Any) -> None:
    """The lost residuals stay lost; those since then are all that a resumed run needs."""
    for result in run_ranks(_after_a_failed_commit):
        assert result["failed"] == ("none", False, 3)
        assert result["later"] == ("per_rank", True, 5)
        assert torch.equal(result["weights"], result["resumed"])


# ---- residuals that nodes have saved


def _layers(width: int = 32, count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def _train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(3, 32)).square().mean().backward()


def _residuals(state: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    return {name: entry["residual"] for name, entry in state["parameters"].items()}


def _saved_between_nodes() -> list[dict[str, Any]]:
    """Save between nodes, load without nodes, and save again. Return three means over the ranks.

    They are those of the first save, of the second save, and of the residuals after it.
    """
    models = [DistributedDataParallel(_layers()) for _ in range(2)]
    between = commhooks.attach(models[0], "powerSGD", hook_options=FROM_STEP_0, ranks_per_node=2)
    flat = commhooks.attach(models[1], "powerSGD", hook_options=FROM_STEP_0)
    torch.manual_seed(dist.get_rank())
    _train(models[0], 2)
    saved = between.state_dict("per_rank")
    expected = _residuals(between.state_dict("mean"))
    _train(models[1], 1)
    flat.load_state_dict(saved)
    saved_again = _residuals(flat.state_dict("mean"))
    residuals = session_of(flat).state["residual"]
    for name, mean in expected.items():
        assert mean is not None
        total = residuals.get(name, torch.zeros(mean.numel())).clone()
        dist.all_reduce(total)
        residuals[name] = total / dist.get_world_size()
    return [expected, saved_again, residuals]


def test_a_run_without_nodes_saves_the_mean_of_residuals_that_nodes_saved(run_ranks: Any) -> None:
    for expected, saved_again, residuals in run_ranks(_saved_between_nodes, world_size=4):
        for name, mean in expected.items():
            assert mean.any()
            for other in (saved_again[name], residuals[name]):
                assert torch.allclose(other.flatten(), mean.flatten(), atol=1e-6)


def _loaded_from_rank_0() -> tuple[list[bool], list[str]]:
    """Load on every rank what rank 0 saved. Rank 1 of each node owns the compressed parameter."""
    hooks = []
    for _ in range(2):
        model = DistributedDataParallel(_layers())
        config = commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["0.*"])
        hooks.append((model, commhooks.attach(model, config, ranks_per_node=2)))
    (first, saving), (second, loading) = hooks
    torch.manual_seed(dist.get_rank())
    _train(first, 2)
    box = [saving.state_dict("per_rank")]
    saved = [residual is not None for residual in _residuals(box[0]).values()]
    dist.broadcast_object_list(box)
    loading.load_state_dict(box[0])
    with log_lines() as lines:
        _train(second, 1)
    return saved, [line for line in lines if "residual of at least one rank is missing" in line]


def test_a_file_without_residuals_of_one_rank_is_not_taken_for_that_of_all(run_ranks: Any) -> None:
    ranks = run_ranks(_loaded_from_rank_0, world_size=4)
    assert [saved for saved, _ in ranks] == [[False, False], [False, True]] * 2
    assert [len(lines) for _, lines in ranks] == [1, 0, 0, 0]
