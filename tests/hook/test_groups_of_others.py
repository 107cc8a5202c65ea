"""Groups of torchft average as torch's own; a group that does not number its ranks is refused."""

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.models import bits_equal
from tests.support.sharded import learned, mesh_of, shard
from tests.support.training import SEVERAL_BUCKETS_MB, batch, flat, make_model

HOOKS: dict[str, dict[str, Any]] = {
    "powerSGD": {"hook_options": {"start_powerSGD_iter": 1, "matrix_approximation_rank": 2}},
    "int8": {"hook_options": {"start_iter": 1}},
    "bf16": {},
    "diloco": {"hook_options": {"sync_every": 2, "start_iter": 1}},
}


def _attached_to(group: dist.ProcessGroup) -> str:
    ddp = DistributedDataParallel(make_model())
    with pytest.raises(commhooks.AttachError) as error:
        commhooks.attach(ddp, "int8", process_group=group)
    return str(error.value)


def _all_are_rank_0() -> str:
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(dist.ProcessGroup, "rank", lambda self: 0):
        return _attached_to(group)


def test_ranks_without_numbers_are_refused(run_ranks: Any) -> None:
    """Each would take itself for rank 0, and the averages of quantised messages would be wrong."""
    for message in run_ranks(_all_are_rank_0):
        assert (
            "have the numbers 0, 0, not 0 to 1" in message
            and "Make a subclass whose rank()" in message
        )


def _trained(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Weights and residuals after three steps, with DDP and once with FSDP2. The hook averages over
    `group`; None: over a group of torch.
    """
    results = {}
    mesh = mesh_of(2, 1)
    for hook, options in HOOKS.items():
        ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
        attached = commhooks.attach(ddp, hook, process_group=group, **options)
        results[hook] = _train(ddp, attached)
        saved = attached.state_dict("mean")
        assert saved["world_size"] == 2 and saved.get("exact", True)
    sharded = shard(make_model(), mesh["shard"])
    attached = commhooks.attach(
        sharded, "int8", replicate_group=group or mesh["replicate"], **HOOKS["int8"]
    )
    return results | {"sharded": _train(sharded, attached)}


def _train(model: torch.nn.Module, hook: commhooks.CommHook) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        images, labels = batch(step, dist.get_rank())
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert hook.stats()["bytes_sent"] > 0
    return {"weights": flat(model.parameters())} | learned(hook)


def _with_torch_and_torchft() -> tuple[dict[str, Any], ...]:
    from torchft.process_group import ProcessGroupGloo

    class Replicas(ProcessGroupGloo):  # as docs/fsdp2.md says
        def rank(self) -> int:
            return dist.get_rank()

        def get_group_store(self) -> dist.Store:
            return store

    port = [dist.TCPStore("127.0.0.1", 0, is_master=True)] if dist.get_rank() == 0 else []
    ports = [port[0].port if port else None]
    dist.broadcast_object_list(ports)
    store = dist.TCPStore("127.0.0.1", ports[0])
    groups = {}
    for kind in (ProcessGroupGloo, Replicas):
        group = kind(timeout=timedelta(seconds=60))
        group.configure(
            f"127.0.0.1:{ports[0]}/{kind.__name__}",
            f"replica {dist.get_rank()}",
            dist.get_rank(),
            2,
        )
        groups[kind.__name__] = group.register(kind.__name__)
    assert "Make a subclass whose rank()" in _attached_to(groups["ProcessGroupGloo"])
    return _trained(None), _trained(groups["Replicas"])


def test_a_group_of_torchft_averages_as_one_of_torch(run_ranks: Any) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    for torchs, torchfts in run_ranks(_with_torch_and_torchft):
        for hook in torchs:
            assert torchs[hook].keys() == torchfts[hook].keys()
            assert bits_equal(torchs[hook], torchfts[hook]), hook
