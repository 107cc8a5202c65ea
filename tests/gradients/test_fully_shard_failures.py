"""A backward pass of a model sharded by `fully_shard` that fails, and the passes after it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commhooks
from tests.support.features import fully_shard_on_gloo, reset_iter_state


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
    for each in (model.one, model.two, model):
        fully_shard(each, mesh=mesh["shard"])
    commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    images, found = torch.randn(3, 16), []
    for fails in (False, True, False):
        model.zero_grad()
        _Fails.now = fails
        with pytest.raises(ValueError, match="in the backward") if fails else contextlib.nullcontext():
            model(images).loss.backward()
            grad = model.one.weight.grad
            found.append(getattr(grad, "to_local", grad.clone)().clone())
        model.reset_iter_state()
    return found


@fully_shard_on_gloo
@reset_iter_state
def test_a_backward_pass_after_one_that_failed(run_ranks: Any) -> None:
    """Also where the loss is not in what the model returns."""
    for before, after in run_ranks(_fail_and_go_on):
        assert torch.equal(before, after)
