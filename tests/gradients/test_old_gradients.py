"""An earlier gradient of an unused parameter (`find_unused_parameters`) is not averaged."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.kernels import computing_with
from tests.support.models import masks

COMPRESSED = {"start_powerSGD_iter": 1, "matrix_approximation_rank": 2}


class _Two(nn.Module):
    """As a generator and a discriminator in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(48, 24, bias=False) for _ in range(2))

    def forward(self, which: int, factors: torch.Tensor) -> torch.Tensor:
        return (self.parts[which].weight * factors).sum()


def _in_turn(
    hook: str, options: dict[str, Any], kernel: str, clear: bool
) -> tuple[torch.Tensor, int]:
    """What the gradients of the first part come to, over four passes of each."""
    model = DistributedDataParallel(_Two(), find_unused_parameters=True)
    on_accelerator = kernel == "accelerator"
    with masks(on_accelerator), computing_with("torch" if on_accelerator else kernel):
        attached = commhooks.attach(model, hook, hook_options=options)
        one, other = (part.weight for part in model.module.parts)
        total = torch.zeros_like(one)
        for step in range(4):
            factors = torch.randn(
                24, 48, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
            )
            one.grad = None
            model(0, factors).backward()
            total += one.grad
            if clear:
                one.grad = None
            other.grad = None
            model(1, factors).backward()
            if clear:
                other.grad = None
        return total, attached.stats()["compressed_steps"]


@pytest.mark.parametrize(
    ("hook", "options", "kernel"),
    [
        ("powerSGD", COMPRESSED, "native"),
        ("powerSGD", COMPRESSED, "accelerator"),
        ("int8", {}, "native"),
        ("int8", {}, "accelerator"),
    ],
)
def test_it_is_not_taken_for_a_new_one(
    run_ranks: Any, hook: str, options: Any, kernel: str
) -> None:
    """DDP drops the result for what no rank has used: what a residual gives to it would be lost."""
    old = run_ranks(_in_turn, hook, options, kernel, clear=False)
    none = run_ranks(_in_turn, hook, options, kernel, clear=True)
    for (with_old, steps), (without, _) in zip(old, none, strict=True):
        assert torch.equal(with_old, without) and steps > 4


def _accumulate(hook: str | None, sync: bool) -> list[torch.Tensor]:
    """Passes add up. In the last one each rank uses another part."""
    model = DistributedDataParallel(_Two(), find_unused_parameters=True)
    commhooks.attach(model, hook)
    rank = dist.get_rank()
    factors = torch.randn(24, 48, generator=torch.Generator().manual_seed(rank))
    if sync:
        model(0, factors).backward()
        model(1, factors).backward()
    else:
        with model.no_sync():
            model(1 - rank, factors).backward()
    model(rank, 2 * factors).backward()
    return [part.weight.grad for part in model.module.parts]


@pytest.mark.parametrize("sync", [True, False])
def test_it_counts_where_another_rank_uses_the_parameter(run_ranks: Any, sync: bool) -> None:
    exact, rounded = (run_ranks(_accumulate, hook, sync) for hook in (None, "int8"))
    for right, got in zip(exact, rounded, strict=True):
        for exact_gradient, other in zip(right, got, strict=True):
            assert (
                torch.allclose(exact_gradient, other, atol=0.1) and exact_gradient.abs().max() > 1
            )


def _wrap_again() -> int:
    module = _Two()
    for _ in range(3):
        model = DistributedDataParallel(module, find_unused_parameters=True)
        commhooks.attach(model, "int8")
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
    return len(module.parts[0].weight._post_accumulate_grad_hooks or ())


def test_nothing_is_left_on_the_parameters(run_ranks: Any) -> None:
    assert run_ranks(_wrap_again) == [0, 0]
