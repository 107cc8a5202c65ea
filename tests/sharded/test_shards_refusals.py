"""What shards cannot do is said in one sentence when the hook is attached, and changes nothing."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map, tree_map_only

import commhooks
from commhooks import AttachError, HookConfigError, Shards
from tests.sharded.shards_models import Net, backward, logged, sharded
from tests.support.features import custom_collectives

pytestmark = custom_collectives

WRONG: list[tuple[Any, str]] = [
    ("int4", "shards='int4'; expected 'int8', 'bf16', commhooks.Shards(...), or None"),
    (8, "shards=8; expected 'int8'"),
]


@pytest.mark.parametrize(
    "more", [{"check_every": 5}, {"ranks_per_node": 2}, {"members": "torchft"}, {"wrapper": "bf16"}]
)
def test_arguments_of_hooks_are_refused_without_one(more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(HookConfigError, match=f"{name} with shards and hook=None"):
        commhooks.attach(nn.Linear(2, 2), None, shards="int8", **more)


@pytest.mark.parametrize(("given", "sentence"), WRONG)
def test_a_wrong_argument_is_told(given: Any, sentence: str) -> None:
    with pytest.raises(HookConfigError, match=re.escape(sentence)):
        commhooks.attach(nn.Linear(2, 2), None, shards=given)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weights": "int4"}, "Shards: weights='int4'; expected one of 'int8', 'bf16', None"),
        ({"weights": None, "gradients": None}, "compresses nothing: leave out shards"),
        ({"block_size": 100}, "Shards: block_size=100; expected a multiple of 16 between 16 and"),
        ({"block_size": True}, "Shards: block_size=True; expected a multiple of 16"),
        ({"ranks_per_node": 0}, "Shards: ranks_per_node=0; expected 'auto', a number of ranks"),
        ({"exclude": "head"}, "Shards: exclude='head'; expected a list of text"),
        ({"exclude": [""]}, "Shards: exclude=['']; expected patterns that are not empty"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HookConfigError, match=re.escape(sentence)):
        Shards(**options)


class SymmMemAllGather:
    """What set_symm_mem_for_comm sets, which needs CUDA (torch 2.13)."""


class _Float8(torch.Tensor):
    """As torchao's weights: a tensor around another, which chooses what FSDP2 gathers of it."""

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "_Float8":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride())
        made._inner = inner
        return made

    def fsdp_pre_all_gather(self, mesh: Any) -> None: ...

    def fsdp_post_all_gather(self, *arguments: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value._inner if isinstance(value, cls) else value

        out = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, out)


def _with_float8() -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(_Float8(layer.weight.detach()))
    return fully_shard(layer)


def _raised(model: nn.Module, **more: Any) -> str:
    with pytest.raises((AttachError, HookConfigError)) as raised:
        commhooks.attach(model, None, **{"shards": Shards(), **more})
    return str(raised.value)


def _refused() -> dict[str, str]:
    found = {"ddp": _raised(DistributedDataParallel(Net()))}
    found["fsdp1"] = _raised(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))
    model = sharded()
    model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    found["process group"] = _raised(model)
    model = sharded()
    commhooks.attach(model, None, shards="bf16")
    found["twice"] = _raised(model)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    found["native HSDP"] = _raised(sharded(mesh))
    model = sharded()
    if dist.get_rank() == 1:
        model.head.weight.requires_grad_(False)
    found["other units"] = _raised(model)
    model = sharded()
    if dist.get_rank() == 1:
        model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    found["on one rank"] = _raised(model)
    for hook in ("int8_compress", commhooks.DiLoCo(sync_every=5)):
        with pytest.raises(HookConfigError) as raised:
            commhooks.attach(sharded(), hook, shards="int8")
        found[f"one replica, {type(hook).__name__}"] = str(raised.value)
    model = Net()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    fully_shard(model.head, mesh=alone)
    found["several meshes"] = _raised(fully_shard(model))
    model = sharded()
    model.set_custom_all_gather(SymmMemAllGather())
    found["symmetric memory"] = _raised(model)
    found["float8"] = _raised(_with_float8())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"])
    stepping = model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    given = {"hook": "int8_compress", "replicate_group": mesh["replicate"], "shards": "int8"}
    with pytest.raises(AttachError) as raised:
        commhooks.attach(model, **given)
    found["the other hook"] = str(raised.value)
    stepping.remove()
    commhooks.attach(model, **given)  # nothing is left of the first one
    found["no glob"] = _warned()
    return found


def _warned() -> str:
    with logged() as lines:
        commhooks.attach(sharded(), None, shards=Shards(exclude=["hed*"]))
    return "; ".join(lines)


def test_refusals_name_the_remedy(run_ranks: Any) -> None:
    sentences = {
        "ddp": "shards with a model that fully_shard has not sharded",
        "fsdp1": "FullyShardedDataParallel (FSDP1) takes no hook",
        "process group": "unit blocks.0 has an all-gather of its own already, ProcessGroupAlloc",
        "twice": "an earlier hook with shards (call its detach())",
        "native HSDP": "mesh of two dimensions",
        "several meshes": "are sharded over different meshes; a hook needs one mesh",
        "symmetric memory": "an all-gather of its own already, SymmMemAllGather: shards cannot be",
        "float8": "unit Linear has parameters of type _Float8, which choose themselves what is",
        "the other hook": "parameter head.weight has a post-accumulate-grad hook",
        "one replica, str": "hook 'int8_compress' with shards and without replicate_group",
        "one replica, DiLoCo": "hook 'diloco' with shards and without replicate_group",
        "other units": "ranks 1 of the sharding group have other units than rank 0",
    }
    first, second = run_ranks(_refused)
    for found in (first, second):
        for name, sentence in sentences.items():
            assert sentence in found[name], (name, found[name])
    assert "ranks [1] of the sharding group" in first["on one rank"]
    assert "ProcessGroupAlloc" in second["on one rank"]
    assert "'hed*'" in first["no glob"] and not second["no glob"]


def test_uneven_nodes_are_refused_on_all_ranks(run_ranks: Any) -> None:
    for sentence in run_ranks(_uneven, world_size=3):
        assert "the nodes have 2 and 1 ranks" in sentence


def _uneven() -> str:
    return _raised(sharded(), shards=Shards(ranks_per_node=2))


def _of_other_torch() -> list[str]:
    found = []
    setter = FSDPModule.set_custom_reduce_scatter
    try:
        del FSDPModule.set_custom_reduce_scatter
        found.append(_raised(sharded()))
    finally:
        FSDPModule.set_custom_reduce_scatter = setter  # type: ignore[method-assign]

    def several(*_: Any) -> None:
        raise ValueError("not supported with multiple param groups")

    model = sharded()
    model.set_custom_all_gather = several  # type: ignore[assignment]
    found.append(_raised(model))
    return found


def test_other_versions_and_groups_are_refused(run_ranks: Any) -> None:
    for missing, several in run_ranks(_of_other_torch):
        assert f"which torch {torch.__version__} lacks: install a newer version" in missing
        assert "unit Net takes no shards: not supported with multiple param groups" in several


def _without_gradients() -> dict[str, Any]:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    found: dict[str, Any] = {}
    for include in (False, True):
        model = fully_shard(Sometimes())
        model.set_reduce_scatter_unused_params(include)
        hook = commhooks.attach(model, None, shards="int8")
        with logged() as lines:
            for _ in range(2):
                model(torch.ones(2, 32)).sum().backward()
        stats = hook.stats()["shards"]
        found[f"sent {include}"] = stats["bytes_sent"] / stats["bytes_uncompressed"]
        found[f"warned {include}"] = sum("set_reduce_scatter_unused_params" in x for x in lines)
    return found


def test_a_unit_with_missing_gradients_is_sent_whole_with_a_warning(
    run_ranks: Any,
) -> None:
    for rank, found in enumerate(run_ranks(_without_gradients)):
        assert found["sent False"] > 0.4 and found["sent True"] < 0.3
        assert found["warned False"] == int(rank == 0) and not found["warned True"]


def _one_rank() -> tuple[list[str], float]:
    model = sharded()
    hook = commhooks.attach(model, None, shards="int8")
    with logged() as lines:
        backward(model, 0)
    return lines, hook.stats()["bytes_sent"]


def test_one_rank_sends_nothing(run_ranks: Any) -> None:
    ((lines, sent),) = run_ranks(_one_rank, world_size=1)
    assert sent == 0
    assert len(lines) == 1 and "there is one shard, so nothing is sent" in lines[0]
