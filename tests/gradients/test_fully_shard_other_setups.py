"""Checkpoints where the reduction is wider or narrower than the weights, where a shard is compressed although the whole
parameter is not, and along another dimension."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import commhooks
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

SAVE_AT, STEPS = 3, 5
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "powerSGD": ("powerSGD", POWERSGD),
    "int8": ("int8", {"block_size": 32, "start_iter": 1}),
}


def _other_width(hook: str, wide: torch.dtype, reduced: torch.dtype, folder: str) -> dict[str, Any]:
    """A run that goes on and one that resumes, with the native kernel where there is a compiler."""

    def made(reduce_dtype: torch.dtype) -> tuple[nn.Module, commhooks.CommHook]:
        mesh = mesh_of(2, 2)
        model = shard(Prescribed(wide), mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        name, options = KINDS[hook]
        return model, commhooks.attach(model, name, hook_options=options, replicate_group=mesh["replicate"])

    def steps(model: nn.Module) -> list[dict[str, torch.Tensor]]:
        return [backward(model, random_gradients(step, dtype=wide)) for step in range(SAVE_AT, STEPS)]

    model, first = made(reduced)
    for step in range(SAVE_AT):
        backward(model, random_gradients(step, dtype=wide))
    dcp.save({"hook": first}, checkpoint_id=folder)
    wanted = steps(model)
    model, second = made(reduced)
    dcp.load({"hook": second}, checkpoint_id=folder)
    got = steps(model)
    kept = {t.dtype for own in session_of(second).state.entries.values() for t in own.values()}
    model, third = made(wide)  # the other way round, with the same checkpoint
    dcp.load({"hook": third}, checkpoint_id=folder)
    other = steps(model)
    return {
        "equal": all(map(bits_equal, wanted, got)) and bits_equal(learned(first), learned(second)),
        "computed in": kept == {reduced},
        "other": max(map(worst_error, other, wanted)) < 0.1,
        "compressed": second.stats()["compressed_steps"] == third.stats()["compressed_steps"] == STEPS - SAVE_AT,
        "residuals": any(bool(each.any()) for each in whole_residuals(third).values()),
    }


@pytest.mark.parametrize(("hook", "wide"), [("powerSGD", torch.float32), ("int8", torch.float64)])
def test_weights_and_reduction_of_different_widths(
    run_ranks: Any, tmp_path: Path, hook: str, wide: torch.dtype
) -> None:
    """Wider weights, or a wider reduction."""
    reduced = torch.float32 if wide == torch.float64 else torch.float64
    for outcome in run_ranks(_other_width, hook, wide, reduced, str(tmp_path), world_size=4):
        assert all(outcome.values()), outcome


class _Thin(nn.Module):
    """A bfloat16 weight that int8 in blocks of 256 compresses only on the shard with two of its three rows; with
    `beside` also one that it compresses as a whole."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 86, dtype=torch.bfloat16))
        if beside:
            self.beside = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return sum(((each * gradient[: len(each), : each.shape[1]]).sum() for each in self.parameters()), start=0)  # type: ignore[return-value]


def _thin(shards: int, beside: bool, folder: str, *, save: bool) -> dict[str, Any]:
    mesh = mesh_of(2, shards)
    model = fully_shard(_Thin(beside), mesh=mesh["shard"])
    options = {"block_size": 256, "start_iter": 0}
    hook = commhooks.attach(model, "int8", hook_options=options, replicate_group=mesh["replicate"])

    def step(number: int) -> list[torch.Tensor]:
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        model(torch.randn(64, 86, generator=generator).bfloat16()).backward()
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


@pytest.mark.parametrize("beside", [False, True])
def test_a_shard_that_is_compressed_although_the_whole_is_not(run_ranks: Any, tmp_path: Path, beside: bool) -> None:
    saved = run_ranks(_thin, 2, beside, str(tmp_path), save=True, world_size=4)
    resumed = run_ranks(_thin, 2, beside, str(tmp_path), save=False, world_size=4)
    for rank, (before, after) in enumerate(zip(saved, resumed, strict=True)):
        assert (before["residual"] is None) == (after["residual"] is None) == bool(rank % 2)
        assert all(map(same_bits, sum(before["later"], []), sum(after["later"], [])))
    assert saved[0]["residual"].any() and same_bits(saved[0]["residual"], resumed[0]["residual"])
    # One shard has the whole, which is not compressed; the first of three has a row, which is not, either.
    for shards in (1, 3):
        for outcome in run_ranks(_thin, shards, beside, str(tmp_path), save=False, world_size=2 * shards):
            assert outcome["residual"] is None


def _matrix(replicas: int, shards: int, dim: int, folder: str, *, save: bool) -> dict[str, Any]:
    """One weight of 33 x 20, sharded along `dim`; `shards` 0: DDP."""
    layer = nn.Linear(20, 33, bias=False)
    torch.manual_seed(0)
    model: nn.Module
    if shards == 0:
        model, more = DistributedDataParallel(nn.Sequential(layer)), {"save_residual": "distributed"}
    else:
        mesh = mesh_of(replicas, shards)
        model, more = nn.Sequential(layer), {"replicate_group": mesh["replicate"]}
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
    return {"residual": residual, "step": at, "compressed": hook.stats()["compressed_steps"] > 0, "q": q, "of": shape}


@pytest.mark.parametrize("new", [(2, 0, 0), (2, 2, 0), (1, 4, 1)], ids=str)
def test_shards_along_another_dimension(run_ranks: Any, tmp_path: Path, new: tuple[int, int, int]) -> None:
    saved = run_ranks(_matrix, 2, 2, 1, str(tmp_path), save=True, world_size=4)
    replicas, shards, dim = new
    for after in run_ranks(
        _matrix, replicas, shards, dim, str(tmp_path), save=False, world_size=replicas * max(1, shards)
    ):
        assert after["step"] == SAVE_AT and after["compressed"]
        assert relative_error(after["residual"], saved[0]["residual"]) < 1e-6 and saved[0]["residual"].any()
