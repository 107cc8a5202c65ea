"""What cannot be served is refused with a sentence that says what to do."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import AttachError, HookConfigError, HookRunError
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.models import worst_error
from tests.support.sharded import (
    Prescribed,
    attached,
    backward,
    learned,
    mean_over_ranks,
    mesh_of,
    random_gradients,
    shard,
)


def _groups() -> dict[str, Any]:
    mesh = mesh_of(1, 1)
    return {"shard": mesh["shard"], "replicate": mesh["replicate"], "both": mesh}


def _sharded(mesh: Any) -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=mesh)


def _user_function(state: Any, bucket: dist.GradBucket) -> Any: ...


def _with_tensor_parallelism(groups: dict[str, Any]) -> nn.Module:
    tp = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), tp["tp"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=tp["dp"])


def _on_meta(groups: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        return _sharded(groups["shard"])


def _with_a_hook(groups: dict[str, Any]) -> nn.Module:
    model = _sharded(groups["shard"])
    commhooks.attach(model, "allreduce", replicate_group=groups["replicate"])
    return model


def _frozen(groups: dict[str, Any]) -> nn.Module:
    return fully_shard(nn.Linear(4, 4).requires_grad_(False), mesh=groups["shard"])


def _plain(groups: dict[str, Any]) -> nn.Module:
    return _sharded(groups["shard"])


CASES: dict[
    str, tuple[Callable[[dict[str, Any]], nn.Module], dict[str, Any], type[Exception], str]
] = {
    "two dimensions": (
        lambda groups: _sharded(groups["both"]),
        {},
        AttachError,
        (
            r"over the replicas.*fully_shard\(module, mesh=mesh\['shard'\]\).*,"
            r" replicate_group=mesh\['replicate'\]"
        ),
    ),
    "a drop-in with a state": (
        _plain,
        {"hook": commhooks.powerSGD_hook, "hook_state": commhooks.PowerSGDState(None, 1)},
        HookConfigError,
        "which only DistributedDataParallel has",
    ),
    "no group": (
        _plain,
        {"replicate_group": None},
        HookConfigError,
        r"replicate_group=None; .*mesh\['replicate'\]",
    ),
    "a mesh of two": (
        _plain,
        {"replicate_group": "both"},
        HookConfigError,
        "replicate_group=a mesh of 2 dimensions",
    ),
    "process_group": (
        _plain,
        {"process_group": "replicate"},
        HookConfigError,
        "process_group is for Distributed",
    ),
    "FSDP1": (
        lambda groups: FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
        {},
        AttachError,
        r"FSDP1\) takes no hook.*fully_shard \(FSDP2\) instead",
    ),
    "DDP": (
        lambda groups: DistributedDataParallel(nn.Linear(4, 4)),
        {},
        HookConfigError,
        "replicate_group is for models sharded by fully_shard",
    ),
    "not wrapped": (
        lambda groups: nn.Linear(4, 4),
        {},
        AttachError,
        "or one sharded by fully_shard, got a torch.nn",
    ),
    "tensor parallelism": (
        _with_tensor_parallelism,
        {},
        AttachError,
        "tensor parallelism is not supported",
    ),
    "meta": (_on_meta, {}, AttachError, "on the meta device: attach the hook after materialising"),
    "two hooks": (
        _with_a_hook,
        {},
        AttachError,
        "parameter weight has a post-accumulate-grad hook: an earlier comm",
    ),
    "frozen": (_frozen, {}, AttachError, "both trainable and sharded"),
    "a function": (
        _plain,
        {"hook": _user_function},
        HookConfigError,
        "a function of a GradBucket, which only Dist",
    ),
    "nodes": (
        _plain,
        {"hook": "powerSGD", "ranks_per_node": 2},
        HookConfigError,
        "shard within each node instead",
    ),
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", CASES)
def test_attach_refuses_what_cannot_work(name: str) -> None:
    make, arguments, error, sentence = CASES[name]
    with process_group_of_one():
        groups = _groups()
        passed: dict[str, Any] = {"hook": "allreduce", "replicate_group": "replicate"} | arguments
        if "process_group" in passed:
            passed |= {"process_group": groups["replicate"].get_group()}
        if isinstance(passed["replicate_group"], str):
            passed["replicate_group"] = groups[passed["replicate_group"]]
        with pytest.raises(error, match=sentence):
            commhooks.attach(make(groups), **passed)


def _attach(group: str, hook: str) -> str:
    mesh = mesh_of(2, 2)
    model = shard(Prescribed(), mesh["shard"])
    try:
        commhooks.attach(model, hook, replicate_group=mesh[group])
    except AttachError as error:
        return str(error)
    return ""


def test_the_group_of_the_wrong_ranks_is_refused(run_ranks: Any) -> None:
    for message in run_ranks(_attach, "shard", "allreduce", world_size=4):
        assert "the ranks have different models: parameter 0 is" in message
        assert "shard 0 of 2 on rank 0" in message and "shard 1 of 2 on rank 1" in message


def _different_hooks(differs: str) -> str:
    rank = dist.get_rank()
    return _attach(
        "replicate", "fp16" if (rank % 2 if differs == "shards" else rank == 2) else "allreduce"
    )


def test_different_hooks_are_refused_on_all_ranks(run_ranks: Any) -> None:
    for message in run_ranks(_different_hooks, "shards", world_size=4):
        assert (
            message.startswith("the ranks attach different hooks: rank 0: allreduce")
            and "rank 1: fp16" in message
        )
    one, other, again, last = run_ranks(_different_hooks, "replicas", world_size=4)
    assert one == again and one.startswith("the ranks attach different hooks")
    assert (
        other
        == last
        == "the ranks that hold other shards of the model have failed: ranks [0] of the sharding"
        " group. Look at their errors"
    )


def _changed_after_attach(how: str) -> str:
    mesh = mesh_of(1, 2)
    model = Prescribed()
    if how == "unfrozen":
        model.get_parameter("even.weight").requires_grad_(False)
    shard(model, mesh["shard"])
    hook = commhooks.attach(model, "powerSGD", replicate_group=mesh["replicate"])
    if how == "unfrozen":
        model.get_parameter("even.weight").requires_grad_(True)
    else:
        child = model.get_submodule("even")
        child.weight = nn.Parameter(child.weight.detach().clone())
    try:
        backward(model, random_gradients(0))
    except HookRunError as error:
        assert learned(hook)["step"] == 0
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["unfrozen", "replaced"])
def test_parameters_that_came_later_are_an_error(run_ranks: Any, how: str) -> None:
    for message in run_ranks(_changed_after_attach, how, world_size=2):
        assert (
            "that the model did not have when the hook was attached, or that were frozen then"
            in message
        )


def _hooked_after_attach() -> dict[str, Any]:
    model, hook = attached(2, 1, "allreduce")
    seen: list[torch.Tensor] = []
    model.get_parameter("even.weight").register_post_accumulate_grad_hook(seen.append)
    try:
        backward(model, random_gradients(0))
    except HookRunError as error:
        return {"said": str(error), "seen": len(seen), "passes": hook.stats()["compressed_steps"]}
    return {"said": "", "seen": len(seen)}


def test_a_hook_on_a_parameter_that_came_later_is_refused(run_ranks: Any) -> None:
    for outcome in run_ranks(_hooked_after_attach, world_size=2):
        assert (
            "parameter even.weight has got a post-accumulate-grad hook since the comm"
            in outcome["said"]
        )
        assert outcome["seen"] == 0


def _detached() -> dict[str, bool]:
    mesh = mesh_of(2, 1)
    model = shard(Prescribed(), mesh["shard"])
    first = commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    backward(model, random_gradients(0))
    first.detach()
    gradients = backward(model, random_gradients(1))
    alone = all(
        torch.equal(gradients[name], gradient) for name, gradient in random_gradients(1).items()
    )
    second = commhooks.attach(model, "allreduce", replicate_group=mesh["replicate"])
    first.detach()  # it is not there any more, and takes nothing off
    first.close()
    got = backward(model, random_gradients(2))
    second.close()
    with pytest.raises(HookRunError, match=r"after close\(\) of this model's communication hook"):
        backward(model, random_gradients(3))
    return {
        "alone": alone and first.stats()["backward_passes"] == 1,
        "again": (
            worst_error(got, mean_over_ranks(2, 2)) < 1e-14
            and second.stats()["backward_passes"] == 1
        ),
    }


def test_a_detached_hook_makes_room_for_another(run_ranks: Any) -> None:
    for outcome in run_ranks(_detached, world_size=2):
        assert all(outcome.values()), outcome


def test_ddp_keeps_its_hook() -> None:
    with process_group_of_one():
        hook = commhooks.attach(DistributedDataParallel(nn.Linear(4, 4)), "allreduce")
        with pytest.raises(AttachError, match="cannot remove a communication hook"):
            hook.detach()


def _said() -> list[str]:
    with log_lines("commhooks", logging.INFO) as lines:
        config = commhooks.PowerSGD(start_powerSGD_iter=9, exclude=["nothing.*"])
        model, _ = attached(2, 2, config, total_steps=5)
        backward(model, random_gradients(0))
    return lines


def test_one_rank_of_the_model_logs(run_ranks: Any) -> None:
    first, *others = run_ranks(_said, world_size=4)
    assert others == [[], [], []]
    assert sum("begins at step 9, but" in line for line in first) == 1
    assert sum("no parameter of the model matches 'nothing.*'" in line for line in first) == 1
    assert (
        sum("plain all-reduce until step 9, then" in line for line in first) == 1
        and len(first) == 3
    )
