"""A backward pass of a model sharded by `fully_shard` that fails, and the passes after it."""

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks.engine.backward_pass import BackwardPass
from tests.support.features import fully_shard_on_gloo, reset_iter_state
from tests.support.inside import session_of


class _Fails(torch.autograd.Function):
    now = False

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if _Fails.now:
            raise ValueError("in the backward pass")
        return grad


class _Output:
    """In which no hook finds the loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, images: torch.Tensor) -> _Output:
        return _Output(self.two(_Fails.apply(self.one(images))).square().mean())


def _fail_and_go_on() -> list[torch.Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = _TwoLayers()
    for module in (model.one, model.two, model):
        fully_shard(module, mesh=mesh["shard"])
    commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    images = torch.randn(3, 16)
    results = []
    for fails in (False, True, False):
        model.zero_grad()
        _Fails.now = fails
        with (
            pytest.raises(ValueError, match="in the backward")
            if fails
            else contextlib.nullcontext()
        ):
            model(images).loss.backward()
            grad = model.one.weight.grad
            results.append(getattr(grad, "to_local", grad.clone)().clone())
        model.reset_iter_state()
    return results


@fully_shard_on_gloo
@reset_iter_state
def test_a_backward_pass_after_one_that_failed_is_right(run_ranks: Any) -> None:
    """Also where the loss is not in what the model returns."""
    for before, after in run_ranks(_fail_and_go_on):
        assert torch.equal(before, after)


def _commit_fails() -> list[tuple[bool, bool]]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(model, mesh=mesh["shard"])
    hook = commhooks.attach(
        model,
        "powerSGD",
        hook_options={"start_powerSGD_iter": 0},
        replicate_group=mesh["replicate"],
    )
    results = []
    images = torch.randn(3, 16)
    for fails in (False, True, False):
        loss = model(images).square().mean()
        failing = mock.patch.object(BackwardPass, "commit", side_effect=MemoryError)
        with failing if fails else contextlib.nullcontext():
            with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
                loss.backward()
        if fails:
            model.reset_iter_state()
        model.zero_grad()
        session = session_of(hook)
        results.append((session.state.local_missing, session.held.commit_failed))
    return results


@fully_shard_on_gloo
@reset_iter_state
def test_the_commit_after_one_that_failed_is_whole_again(run_ranks: Any) -> None:
    """A save after a failed commit lacks the residuals; a save after the next commit has them."""
    for results in run_ranks(_commit_fails):
        assert results == [(False, False), (True, True), (False, False)]
