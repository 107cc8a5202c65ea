"""Models of `torch.distributed._composable.replicate` are compressed, saved and resumed."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support import features
from tests.support.sharded import mesh_of
from tests.support.training import batch, make_model

KINDS = [
    "replicate",
    pytest.param("with fsdp", marks=[features.fully_shard_on_gloo, features.replicate_with_fsdp]),
]
OPTIONS = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 1}


def _new(
    kind: str, hook: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, Any]:
    """A replicated model, and its hook; `hook` "native": without one."""
    model = make_model(dtype)
    if kind == "DDP":
        model = DistributedDataParallel(model)
        return model, commhooks.attach(model, hook, save_residual="distributed", **options)
    if kind == "replicate":
        replicate(model, bucket_cap_mb=0.001)
        options |= {"save_residual": "distributed"}
    else:
        from torch.distributed._composable.replicate_with_fsdp import (
            replicate as replicate_with_fsdp,
        )

        mesh = mesh_of(dist.get_world_size(), 1)
        mesh_of_model = mesh["replicate" if hook == "native" else "shard"]
        for layer in model:
            if any(True for _ in layer.parameters()):
                replicate_with_fsdp(layer, mesh=mesh_of_model)
        replicate_with_fsdp(model, mesh=mesh_of_model)
        options |= {"replicate_group": mesh["replicate"]}
    return model, None if hook == "native" else commhooks.attach(model, hook, **options)


def _train(model: nn.Module, steps: range) -> list[torch.Tensor]:
    """With accumulation and clipping."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dtype = next(model.parameters()).dtype
    for step in steps:
        for part in range(2):
            images, labels = batch(2 * step + part, dist.get_rank(), dtype)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = part == 1
            else:
                model.set_requires_gradient_sync(part == 1)
            torch.nn.functional.cross_entropy(model(images).float(), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return _weights(model)


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def _run(kind: str) -> dict[str, Any]:
    exact = []
    for dtype in (torch.float32, torch.bfloat16):
        native, hooked = (
            _train(_new(kind, hook, dtype)[0], range(3)) for hook in ("native", "allreduce")
        )
        exact.append(
            max(float((one - other).abs().max()) for one, other in zip(native, hooked, strict=True))
        )
    model, hook = _new(kind, "powerSGD", hook_options=OPTIONS)
    _train(model, range(2))
    saved = hook.state_dict("distributed")
    weights = _weights(model)
    after = _train(model, range(2, 4))
    resumed = []
    for other in (kind, "DDP"):
        again, new = _new(other, "powerSGD", hook_options=OPTIONS | {"start_powerSGD_iter": 900})
        with torch.no_grad():
            for parameter, value in zip(again.parameters(), weights, strict=True):
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(value)
        new.load_state_dict(_plain(saved) if other == "DDP" else saved)
        resumed.append(_train(again, range(2, 4)))
        assert new.stats()["compressed_steps"] == 2
    return {
        "exact": exact,
        "after": after,
        "resumed": resumed,
        "names": sorted(saved["residual"]),
        "stats": hook.stats(),
    }


def _plain(saved: dict[str, Any]) -> dict[str, Any]:
    whole = {
        name: t.full_tensor() if isinstance(t, DTensor) else t
        for name, t in saved["residual"].items()
    }
    return saved | {"residual": whole}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_compressed_saved_and_resumed(run_ranks: Any, kind: str) -> None:
    ranks = run_ranks(_run, kind)
    for rank in ranks:
        assert max(rank["exact"]) <= 1e-6
        same, as_ddp = rank["resumed"]
        assert all(map(torch.equal, rank["after"], same))
        assert all(map(torch.equal, rank["after"], ranks[0]["after"]))
        for one, other in zip(rank["after"], as_ddp, strict=True):
            assert torch.allclose(one, other, atol=1e-6)
        assert rank["names"] == ["0.weight", "3.weight", "5.weight", "7.weight"]
        assert rank["stats"]["compressed_steps"] == 3 and rank["stats"]["compression_rate"] > 1.5


def _over_all_ranks() -> str:
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    model = replicate_with_fsdp(nn.Linear(8, 8), mesh=mesh_of(2, 1)["replicate"])
    with pytest.raises(commhooks.AttachError) as error:
        commhooks.attach(model, "allreduce", replicate_group=mesh_of(2, 1)["replicate"])
    return str(error.value)


@features.replicate_with_fsdp
def test_a_model_that_averages_itself_is_refused_with_the_two_lines_to_change(
    run_ranks: Any,
) -> None:
    for message in run_ranks(_over_all_ranks):
        assert "replicate(module, mesh=mesh['shard'])" in message and "(2, 1)" in message


SHARDS_ALONE: dict[str, Any] = {"hook": None, "shards": "int8"}
BETWEEN_REPLICAS: dict[str, Any] = {"hook": "allreduce"}


def _a_part_replicated() -> list[str]:
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    ranks = mesh_of(2, 1)["replicate"]
    parts = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    replicate_with_fsdp(parts[1], mesh=ranks)
    models = [fully_shard(parts, mesh=ranks)]
    placed = nn.Linear(8, 8)
    # up to torch 2.13 shard_placement_fn must return Shard (2.11 looks at its `dim`)
    with contextlib.suppress(ValueError, AttributeError):
        models.append(
            fully_shard(
                placed,
                mesh=ranks,
                shard_placement_fn=lambda parameter: Replicate() if parameter.ndim == 1 else None,
            )
        )
    return [
        _refusal(model, **arguments)
        for model in models
        for arguments in (SHARDS_ALONE, BETWEEN_REPLICAS)
    ]


def _refusal(model: nn.Module, hook: str | None, **more: Any) -> str:
    if hook is not None:
        more["replicate_group"] = mesh_of(1, 2)["replicate"]
    with pytest.raises(commhooks.AttachError) as error:
        commhooks.attach(model, hook, **more)
    return str(error.value)


@features.replicate_with_fsdp
@features.custom_collectives
def test_a_part_that_is_replicated_beside_shards_is_refused(run_ranks: Any) -> None:
    for messages in run_ranks(_a_part_replicated):
        assert len(messages) >= 2
        for message in messages:
            assert "is replicated, and" in message and "return Shard(0), not Replicate()" in message
