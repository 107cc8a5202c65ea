"""Saves and loads where ranks hold different things, or a state was saved for another form of the
model.
"""

import copy
import gc
import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.engine.backward_pass import BackwardPass, RunningExchange
from tests.support.ddp_steps import log_lines
from tests.support.features import fully_shard_on_gloo
from tests.support.inside import session_of
from tests.support.training import Run, make_model

RANK_2 = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}

OPTIONS = {"start_powerSGD_iter": 0}


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
    """The mean residual of a run between nodes; that of a run without them which has loaded each
    rank's, and its own mean over the ranks after that save.
    """
    models = [DistributedDataParallel(_layers()) for _ in range(2)]
    between = commhooks.attach(models[0], "powerSGD", hook_options=OPTIONS, ranks_per_node=2)
    flat = commhooks.attach(models[1], "powerSGD", hook_options=OPTIONS)
    torch.manual_seed(dist.get_rank())
    _train(models[0], 2)
    saved = between.state_dict("per_rank")
    right = _residuals(between.state_dict("mean"))
    _train(models[1], 1)
    flat.load_state_dict(saved)
    found = _residuals(flat.state_dict("mean"))
    own = session_of(flat).state["residual"]
    for name, mean in right.items():
        assert mean is not None
        total = own.get(name, torch.zeros(mean.numel())).clone()
        dist.all_reduce(total)
        own[name] = total / dist.get_world_size()
    return [right, found, own]


def test_a_mean_of_what_nodes_have_saved_is_that_of_each_parameter(run_ranks: Any) -> None:
    for right, found, own in run_ranks(_saved_between_nodes, world_size=4):
        for name, mean in right.items():
            assert mean.any() and torch.allclose(found[name].flatten(), mean.flatten(), atol=1e-6)
            assert torch.allclose(own[name].flatten(), mean.flatten(), atol=1e-6)


def _loaded_from_rank_0() -> tuple[list[bool], list[str]]:
    """The compressed parameter belongs to rank 1 of each node, and every rank loads what rank 0 has
    saved.
    """
    hooks = []
    for _ in range(2):
        model = DistributedDataParallel(_layers())
        config = commhooks.PowerSGD(start_powerSGD_iter=0, exclude=["0.*"])
        hooks.append((model, commhooks.attach(model, config, ranks_per_node=2)))
    (first, saving), (second, loading) = hooks
    torch.manual_seed(dist.get_rank())
    _train(first, 2)
    box = [saving.state_dict("per_rank")]
    had = [each is not None for each in _residuals(box[0]).values()]
    dist.broadcast_object_list(box)
    loading.load_state_dict(box[0])
    with log_lines() as lines:
        _train(second, 1)
    return had, [line for line in lines if "residual of at least one rank is missing" in line]


def test_the_state_of_a_rank_without_residuals_is_not_taken_for_that_of_all(run_ranks: Any) -> None:
    found = run_ranks(_loaded_from_rank_0, world_size=4)
    assert [had for had, _ in found] == [[False, False], [False, True]] * 2
    assert [len(lines) for _, lines in found] == [1, 0, 0, 0]


def _other_form() -> list[str]:
    ddp, sharded = DistributedDataParallel(_layers()), _layers()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(sharded, mesh=mesh["shard"])
    hooks = [
        commhooks.attach(ddp, "powerSGD", hook_options=OPTIONS, save_residual="distributed"),
        commhooks.attach(
            sharded, "powerSGD", hook_options=OPTIONS, replicate_group=mesh["replicate"]
        ),
    ]
    torch.manual_seed(dist.get_rank())
    _train(ddp, 1)
    _train(sharded, 1)
    states = [hook.state_dict() for hook in hooks]
    found = []
    for hook, state in zip(hooks, reversed(states), strict=True):
        with pytest.raises(commhooks.PayloadError) as caught:
            hook.load_state_dict(state)
        found.append(str(caught.value))
    return found


@fully_shard_on_gloo
def test_a_state_of_another_sharding_says_how_to_load_it(run_ranks: Any) -> None:
    for texts in run_ranks(_other_form):
        for text in texts:
            assert "saved for another sharding. Load it with torch.distributed.checkpoint" in text


# ---- files of one rank
# -----------------------------------------------------------------------------------------------


def _make_inexact(payload: dict[str, Any]) -> None:
    payload.update(residual="none", residual_ranks=[], exact=False)
    for entry in payload["parameters"].values():
        entry["residual"] = None


def _one_rank_inexact() -> torch.Tensor:
    saved = Run.new(hook_options=RANK_2).train(5).save()
    if dist.get_rank() == 1:
        _make_inexact(saved["hook"])
    return Run.new(hook_options=RANK_2).load(saved).train(3).weights()


def _nobody_has_residuals() -> torch.Tensor:
    saved = Run.new(hook_options=RANK_2).train(5).save(residual="drop")
    return Run.new(hook_options=RANK_2).load(saved).train(3).weights()


def test_an_inexact_file_of_one_rank_makes_all_ranks_do_without(run_ranks: Any) -> None:
    expected = run_ranks(_nobody_has_residuals)
    for weights in run_ranks(_one_rank_inexact):
        assert torch.equal(weights, expected[0])


def _one_file_of_rank_0() -> dict[str, Any]:
    saved = Run.new(hook_options=RANK_2).train(5).save()
    box = [saved]
    dist.broadcast_object_list(box, 0)
    run = Run.new(hook_options=RANK_2).load(box[0])
    step = run.hook.stats()["step"]
    return {
        "weights": run.train(3).weights(),
        "step": step,
        "started_from": box[0]["hook"]["residual_ranks"],
    }


def test_the_residual_of_another_rank_is_never_used(run_ranks: Any) -> None:
    """Only rank 0 has saved: all ranks start from residuals of zero, and replicas stay equal."""
    results = run_ranks(_one_file_of_rank_0)
    assert results[0]["started_from"] == [0]
    assert results[0]["step"] == results[1]["step"] == 5
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    dropped = run_ranks(_nobody_has_residuals)
    assert torch.equal(results[0]["weights"], dropped[0])


# ---- a commit or a save that failed on one rank
# ----------------------------------------------------------------------


def _torn_on_one() -> tuple[str, bool, list[str]]:
    """The commit of rank 1 fails; then all ranks save the mean."""
    run = Run.new(hook_options=RANK_2).train(3)
    run.hook.joint_save_limit_s = 1000.0  # longer than the test may take
    if dist.get_rank() == 1:
        failing = mock.Mock(side_effect=MemoryError)
        with mock.patch.object(BackwardPass, "commit", failing), pytest.raises(MemoryError):
            run.train(1)
    else:
        run.train(1)
    with log_lines("commhooks", logging.WARNING) as lines:
        found = [run.hook.state_dict("mean") for _ in range(2)]
    return found[1]["residual"], found[0]["exact"], lines


def test_nobody_waits_for_a_rank_whose_commit_failed(run_ranks: Any) -> None:
    for rank, (residual, exact, lines) in enumerate(run_ranks(_torn_on_one)):
        assert residual == "none" and not exact
        said = [line for line in lines if "rank 1 has lost its residuals" in line]
        assert len(said) == len(lines) == (2 if rank == 1 else 0)


def _declined_before_a_step() -> list[tuple[str, bool]]:
    """Rank 1 loads a payload without residuals, so that it declines the next joint save, but not
    the one after it.
    """
    run = Run.new(hook_options=RANK_2).train(3)
    run.hook.joint_save_limit_s = 60.0
    payload = run.hook.state_dict("per_rank", gather=False)
    if dist.get_rank() == 1:
        _make_inexact(payload)
    run.hook.load_state_dict(payload)
    saved = [run.hook.state_dict("mean"), run.train(1).hook.state_dict("mean")]
    return [(each["residual"], each["exact"]) for each in saved]


def test_a_rank_that_declined_a_joint_save_takes_part_in_that_of_the_next_step(
    run_ranks: Any,
) -> None:
    for declined, joint in run_ranks(_declined_before_a_step):
        assert declined == ("none", False) and joint[0] == "mean"


def _alone_without_a_residual() -> tuple[str, bool]:
    """Rank 1 saves on its own while it has no residual, and then loads one."""
    run = Run.new(hook_options=RANK_2).train(3)
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


def test_a_save_of_one_rank_alone_declines_no_joint_save(run_ranks: Any) -> None:
    assert run_ranks(_alone_without_a_residual) == [("mean", True)] * 2


def _wrapped_anew(model: torch.nn.Module, state: commhooks.PowerSGDState) -> Run:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    return Run(ddp, optimizer, commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state))


def _after_torn() -> dict[str, Any]:
    """The commit fails in the third bucket. DDP is of no use after that; wrapped anew, the same
    state goes on.
    """
    state = commhooks.PowerSGDState(None, 2, 1)
    run = _wrapped_anew(make_model(), state).train(3)
    advance, verdicts = RunningExchange.advance, 0

    def failing(self: RunningExchange, verdict: Any = None) -> None:
        nonlocal verdicts
        verdicts += isinstance(verdict, bool)
        if verdicts == 3:
            raise MemoryError
        advance(self, verdict)

    with mock.patch.object(RunningExchange, "advance", failing), pytest.raises(MemoryError):
        run.train(1)
    torn = run.hook.state_dict("per_rank")
    module = run.ddp.module
    del run
    gc.collect()  # the old wrapper has hooks on the parameters
    run = _wrapped_anew(module, state).train(2)
    saved = copy.deepcopy(run.save())
    run.train(3)
    resumed = (
        _wrapped_anew(make_model(), commhooks.PowerSGDState(None, 2, 900)).load(saved).train(3)
    )
    return {
        "torn": (torn["residual"], torn["exact"], torn["step"]),
        "later": (saved["hook"]["residual"], saved["hook"]["exact"], saved["hook"]["step"]),
        "weights": run.weights(),
        "resumed": resumed.weights(),
    }


def test_after_a_commit_that_failed_the_next_one_is_whole_again(run_ranks: Any) -> None:
    """What was lost stays lost, but what was gathered since then is all that a resumed run
    needs.
    """
    for result in run_ranks(_after_torn):
        assert result["torn"] == ("none", False, 3)
        assert result["later"] == ("per_rank", True, 5)
        assert torch.equal(result["weights"], result["resumed"])
