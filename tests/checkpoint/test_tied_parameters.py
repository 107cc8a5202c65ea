"""A tied parameter has several names, and its state is found by any of them, whichever the model
registers first.
"""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import PowerSGDState
from commhooks.checkpoint.parts import merge, split
from tests.support.ddp_steps import log_lines
from tests.support.models import same
from tests.support.sharded import mesh_of

POWERSGD = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}
HOOKS: dict[str, dict[str, Any]] = {
    "powerSGD": POWERSGD,
    "int4": {"start_iter": 1},
    "diloco": {"sync_every": 2, "outer_momentum": 0.5},
}
STEPS, MORE = 4, 4


class Tied(torch.nn.Module):
    """A small language model whose embedding `tok` and last layer `head` are one parameter, unless
    `tied` is False.
    """

    def __init__(self, first: str, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = {"tok": torch.nn.Embedding(40, 16), "head": torch.nn.Linear(16, 40, bias=False)}
        body = torch.nn.Linear(16, 16)
        if tied:
            layers["head"].weight = layers["tok"].weight
        self.add_module(first, layers.pop(first))
        self.body = body
        self.add_module(*layers.popitem())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.tok(tokens))))  # type: ignore[no-any-return]


def _train(model: torch.nn.Module, first_step: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(first_step, first_step + steps):
        tokens = torch.randint(
            40, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens[0]), tokens[1]).backward()
        optimizer.step()


def _new(first: str, hook: str) -> tuple[DistributedDataParallel, commhooks.CommHook]:
    ddp = DistributedDataParallel(Tied(first), bucket_cap_mb=0.001)
    return ddp, commhooks.attach(ddp, hook, hook_options=HOOKS[hook], save_residual="distributed")


def _weights(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in ddp.module.state_dict().items()}


Save = Callable[[commhooks.CommHook, Path], Any]
Load = Callable[[commhooks.CommHook, Path, Any], None]


def _read_parts(hook: commhooks.CommHook, _: Path, parts: Any) -> None:
    shared, part = parts
    hook.load_state_dict(merge(shared, [part], dist.get_rank(), dist.get_world_size()))


WAYS: dict[str, tuple[Save, Load]] = {
    "own residuals": (
        lambda hook, _: hook.state_dict("per_rank"),
        lambda hook, _, saved: hook.load_state_dict(saved),
    ),
    "mean, not strict": (
        lambda hook, _: hook.state_dict("mean"),
        lambda hook, _, saved: hook.load_state_dict(saved, strict=False),
    ),
    "parts": (lambda hook, _: split(hook.state_dict("per_rank"), dist.get_rank()), _read_parts),
    "distributed checkpoint": (
        lambda hook, folder: dcp.save({"hook": hook}, checkpoint_id=folder),
        lambda hook, folder, _: dcp.load({"hook": hook}, checkpoint_id=folder),
    ),
}


def _state(hook: commhooks.CommHook) -> dict[str, Any]:
    """What the hook has learned, without the names that depend on the order: the tied parameter is
    `tied`.
    """
    saved = hook.state_dict("per_rank")["parameters"]
    return {
        "tied" if name in ("tok.weight", "head.weight") else name: entry
        for name, entry in saved.items()
    }


def _resumed(hook: str, way: str, first: str, then: str, folder: Path) -> dict[str, Any]:
    """Resume, and return the warnings, whether all that was saved is there, and whether both runs
    train alike.
    """
    save, load = WAYS[way]
    ddp, attached = _new(first, hook)
    _train(ddp, 0, STEPS)
    saved = copy.deepcopy(save(attached, folder))
    again, other = _new(then, hook)
    again.module.load_state_dict(_weights(ddp))
    with log_lines(level=logging.WARNING) as lines:
        load(other, folder, saved)
    kept, expected = _state(other), _state(attached)
    assert expected["tied"]["residual"] is not None
    has_all = kept.keys() == expected.keys() and all(
        same(kept[name], expected[name]) for name in kept
    )
    _train(ddp, STEPS, MORE)
    _train(again, STEPS, MORE)
    assert other.stats()["step"] == attached.stats()["step"] > 1
    weights, expected = _weights(again), _weights(ddp)
    return {
        "warnings": [line for line in lines if "strict=False: this load" not in line],
        "has all": has_all,
        "trains alike": all(
            torch.equal(weight, expected[name]) for name, weight in weights.items()
        ),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_with_another_order_of_names_resumes(run_ranks, hook, way, tmp_path):
    for first, then in (("tok", "head"), ("head", "tok")):
        for found in run_ranks(_resumed, hook, way, first, then, tmp_path / first):
            assert found["warnings"] == [] and found["has all"]
            # Which rank rounds the mean of a quantised block depends on the name that is registered
            # first.
            assert found["trains alike"] or hook != "powerSGD"


def _sharded(first: str) -> tuple[torch.nn.Module, commhooks.CommHook]:
    mesh, model = mesh_of(2, 1), Tied(first)
    fully_shard(model, mesh=mesh["shard"])
    return model, commhooks.attach(
        model, "powerSGD", hook_options=POWERSGD, replicate_group=mesh["replicate"]
    )


def _sharded_resumed(folder: Path) -> list[bool]:
    model, hook = _sharded("tok")
    _train(model, 0, STEPS)
    dcp.save({"hook": hook, "model": model.state_dict()}, checkpoint_id=folder)
    again, other = _sharded("head")
    content = {"hook": other, "model": again.state_dict()}
    dcp.load(content, checkpoint_id=folder)
    _train(model, STEPS, MORE)
    _train(again, STEPS, MORE)
    expected = dict(model.named_parameters(remove_duplicate=False))
    found = again.named_parameters(remove_duplicate=False)
    return [torch.equal(each.to_local(), expected[name].to_local()) for name, each in found]


def test_a_sharded_model_with_another_order_of_names_resumes_to_the_bit(run_ranks, tmp_path):
    assert run_ranks(_sharded_resumed, tmp_path) == [[True] * 4] * 2


def _pickled() -> list[bool]:
    def new(first: str, state: PowerSGDState) -> DistributedDataParallel:
        ddp = DistributedDataParallel(Tied(first), bucket_cap_mb=0.001)
        commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state)
        return ddp

    state = PowerSGDState(None, **POWERSGD)
    ddp = new("tok", state)
    _train(ddp, 0, STEPS)
    again = new("head", pickle.loads(pickle.dumps(state)))
    again.module.load_state_dict(_weights(ddp))
    _train(ddp, STEPS, MORE)
    _train(again, STEPS, MORE)
    expected = _weights(ddp)
    return [torch.equal(weight, expected[name]) for name, weight in _weights(again).items()]


def test_a_pickled_state_serves_a_model_with_another_order_of_names(run_ranks):
    assert run_ranks(_pickled) == [[True] * 4] * 2


def _refused(tied: bool) -> str:
    """The error of a load into a model that is tied, or not, of the state of one where it is the
    other way round.
    """
    ddp = DistributedDataParallel(Tied("tok", tied=not tied))
    saved = commhooks.attach(ddp, "int4").state_dict()
    other = DistributedDataParallel(Tied("head", tied=tied))
    with pytest.raises(commhooks.PayloadError) as error:
        commhooks.attach(other, "int4").load_state_dict(saved)
    return str(error.value)


def test_parameters_that_are_no_longer_tied_or_tied_now_are_named(run_ranks):
    assert (
        "head.weight: in the model, not in the saved state (added, renamed, or frozen or tied then)"
        in run_ranks(_refused, tied=False, world_size=1)[0]
    )
    assert (
        "tok.weight: saved apart from head.weight, with which it is tied now"
        in run_ranks(_refused, tied=True, world_size=1)[0]
    )
