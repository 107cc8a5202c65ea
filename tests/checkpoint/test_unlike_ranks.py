"""Saves and loads where ranks hold different things, or a state was saved for another form of the model."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.ddp_steps import log_lines
from tests.support.features import fully_shard_on_gloo
from tests.support.inside import session_of

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
    """The mean residual of a run between nodes; that of a run without them which has loaded each rank's, and its own
    mean over the ranks after that save."""
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
    """The compressed parameter belongs to rank 1 of each node, and every rank loads what rank 0 has saved."""
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
        commhooks.attach(sharded, "powerSGD", hook_options=OPTIONS, replicate_group=mesh["replicate"]),
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
