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

import commhooks
from commhooks import AttachError, HookConfigError, Shards
from tests.sharded.shards_models import Net, backward, logged, sharded

WRONG: list[tuple[Any, str]] = [
    ("int4", "shards='int4'; expected 'int8', 'bf16', commhooks.Shards(...), or None"),
    (8, "shards=8; expected 'int8'"),
]


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


class _Float8(torch.Tensor):
    def fsdp_pre_all_gather(self) -> None: ...


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
    found["uneven nodes"] = ""
    if dist.get_world_size() == 3:
        found["uneven nodes"] = _raised(sharded(), shards=Shards(ranks_per_node=2))
    return found


def test_refusals_name_the_remedy(run_ranks: Any) -> None:
    sentences = {
        "ddp": "shards with a model that fully_shard has not sharded",
        "fsdp1": "FullyShardedDataParallel (FSDP1) takes no hook",
        "process group": "unit blocks.0 has an all-gather of its own already, ProcessGroupAlloc",
        "twice": "an earlier hook with shards (call its detach())",
        "native HSDP": "mesh of two dimensions",
        "other units": "ranks 1 of the sharding group have other units than rank 0",
        "uneven nodes": "",
    }
    for found in run_ranks(_refused):
        for name, sentence in sentences.items():
            assert sentence in found[name], (name, found[name])


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
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Float8))
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
