"""Shards work with another dtype of reduction, along another dimension, and compressed alone."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.features import fully_shard_on_gloo
from tests.support.inside import session_of
from tests.support.models import bits_equal, relative_error, same_bits, worst_error
from tests.support.sharded import (
    POWERSGD,
    Prescribed,
    backward,
    learned,
    mesh_of,
    random_gradients,
    shard,
    whole_residuals,
)

SAVE_AT, STEPS = 2, 3
WIDE, REDUCED = torch.float64, torch.float32


def _other_width(folder: str) -> dict[str, Any]:
    """A run that goes on and one that resumes, with the native kernel where there is a compiler."""

    def made(reduce_dtype: torch.dtype) -> tuple[nn.Module, commhooks.CommHook]:
        mesh = mesh_of(2, 2)
        model = shard(
            Prescribed(WIDE),
            mesh["shard"],
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )
        return model, commhooks.attach(
            model, "powerSGD", hook_options=POWERSGD, replicate_group=mesh["replicate"]
        )

    def steps(model: nn.Module) -> list[dict[str, torch.Tensor]]:
        return [
            backward(model, random_gradients(step, dtype=WIDE)) for step in range(SAVE_AT, STEPS)
        ]

    model, first = made(REDUCED)
    for step in range(SAVE_AT):
        backward(model, random_gradients(step, dtype=WIDE))
    dcp.save({"hook": first}, checkpoint_id=folder)
    wanted = steps(model)
    model, second = made(REDUCED)
    dcp.load({"hook": second}, checkpoint_id=folder)
    got = steps(model)
    kept = {
        t.dtype for of_key in session_of(second).state.entries.values() for t in of_key.values()
    }
    model, third = made(WIDE)  # reduced in a wider dtype, from the same checkpoint
    dcp.load({"hook": third}, checkpoint_id=folder)
    other = steps(model)
    return {
        "equal": all(map(bits_equal, wanted, got)) and bits_equal(learned(first), learned(second)),
        "computed in": kept == {REDUCED},
        "other": max(map(worst_error, other, wanted)) < 0.1,
        "compressed": second.stats()["compressed_steps"]
        == third.stats()["compressed_steps"]
        == STEPS - SAVE_AT,
        "residuals": any(bool(residual.any()) for residual in whole_residuals(third).values()),
    }


@fully_shard_on_gloo
def test_weights_and_reduction_may_have_different_widths(run_ranks: Any, tmp_path: Path) -> None:
    for outcome in run_ranks(_other_width, str(tmp_path), world_size=4):
        assert all(outcome.values()), outcome


class _Thin(nn.Module):
    """Only the shard with two of the weight's three rows is large enough for int8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 86, dtype=torch.bfloat16))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _thin(shards: int, folder: str, *, save: bool) -> dict[str, Any]:
    mesh = mesh_of(2, shards)
    model = fully_shard(_Thin(), mesh=mesh["shard"])
    options = {"block_size": 256, "start_iter": 0}
    hook = commhooks.attach(model, "int8", hook_options=options, replicate_group=mesh["replicate"])

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model(torch.randn(3, 86, generator=generator).bfloat16()).backward()
        return [p.grad.full_tensor().clone() for p in model.parameters()]  # type: ignore[union-attr]

    if save:
        for number in range(SAVE_AT):
            step(number)
        dcp.save({"hook": hook}, checkpoint_id=folder)
    else:
        dcp.load({"hook": hook}, checkpoint_id=folder)
    kept = session_of(hook).state["residual"].get("weight")
    kept = None if kept is None else kept.clone()
    return {"residual": kept, "later": [step(number) for number in range(SAVE_AT, STEPS)]}


def test_a_shard_may_be_compressed_although_the_whole_is_not(
    run_ranks: Any, tmp_path: Path
) -> None:
    saved = run_ranks(_thin, 2, str(tmp_path), save=True, world_size=4)
    resumed = run_ranks(_thin, 2, str(tmp_path), save=False, world_size=4)
    for rank, (before, after) in enumerate(zip(saved, resumed, strict=True)):
        assert (before["residual"] is None) == (after["residual"] is None) == bool(rank % 2)
        assert all(map(same_bits, sum(before["later"], []), sum(after["later"], [])))
    assert saved[0]["residual"].any() and same_bits(saved[0]["residual"], resumed[0]["residual"])
    # One shard has the whole, which is not compressed.
    for outcome in run_ranks(_thin, 1, str(tmp_path), save=False):
        assert outcome["residual"] is None


def _matrix(replicas: int, shards: int, dim: int, folder: str, *, save: bool) -> dict[str, Any]:
    """One weight of 33 x 20, sharded along `dim`; `shards` 0: DDP."""
    layer = nn.Linear(20, 33, bias=False)
    torch.manual_seed(0)
    model: nn.Module
    if shards == 0:
        model = DistributedDataParallel(nn.Sequential(layer))
        more = {"save_residual": "distributed"}
    else:
        mesh = mesh_of(replicas, shards)
        model = nn.Sequential(layer)
        more = {"replicate_group": mesh["replicate"]}
        fully_shard(model, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(dim))
    hook = commhooks.attach(model, "powerSGD", hook_options=POWERSGD, **more)

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model(torch.randn(5, 20, generator=generator)).square().sum().backward()

    if save:
        for number in range(SAVE_AT):
            step(number)
        dcp.save({"hook": hook}, checkpoint_id=folder)
    else:
        dcp.load({"hook": hook}, checkpoint_id=folder)
    (residual,) = whole_residuals(hook).values()
    (loaded,) = session_of(hook).state["residual"].values()
    shape = tuple(loaded.shape)
    q = len(session_of(hook).state["q"])
    at = hook.stats()["step"]
    step(SAVE_AT)
    return {
        "residual": residual,
        "step": at,
        "compressed": hook.stats()["compressed_steps"] > 0,
        "q": q,
        "of": shape,
    }


def test_shards_may_lie_along_another_dimension(run_ranks: Any, tmp_path: Path) -> None:
    saved = run_ranks(_matrix, 2, 2, 1, str(tmp_path), save=True, world_size=4)
    for replicas, shards, dim in ((2, 0, 0), (1, 2, 0), (1, 4, 1)):
        world_size = replicas * max(1, shards)
        for after in run_ranks(
            _matrix, replicas, shards, dim, str(tmp_path), save=False, world_size=world_size
        ):
            assert after["step"] == SAVE_AT and after["compressed"]
            assert (
                relative_error(after["residual"], saved[0]["residual"]) < 1e-6
                and saved[0]["residual"].any()
            )
