"""FSDP2 beside Accelerate: what its plugin does, and a model that is sharded and hooked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.fsdp import fully_shard

import commhooks
from tests.support.accelerators import launched, new_accelerator
from tests.support.models import worst_error
from tests.support.sharded import (
    NAMES,
    POWERSGD,
    Prescribed,
    mean_over_ranks,
    mesh_of,
    random_gradients,
    shard,
    whole_gradients,
)


@launched
def _by_hand() -> dict[str, bool]:
    accelerator = new_accelerator()
    mesh = mesh_of(2, 2)
    model = shard(Prescribed(), mesh["shard"])
    hook = commhooks.attach(model, "powerSGD", hook_options=POWERSGD, replicate_group=mesh["replicate"])
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.zero_grad()
    accelerator.backward(model(random_gradients(0)))
    exact = worst_error(whole_gradients(model), mean_over_ranks(0, 4)) < 1e-14
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    whole = torch.cat([gradient.flatten() for gradient in mean_over_ranks(0, 4).values()]).norm()
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(model(random_gradients(1)))
    optimizer.step()
    return {
        "exact": exact,
        "norm": torch.allclose(norm.full_tensor(), whole),
        "compressed": hook.stats()["compressed_steps"] == 1,
        "trained": whole_gradients(model).keys() == NAMES.keys(),
    }


def test_sharded_and_hooked_by_hand(run_ranks: Any) -> None:
    for outcome in run_ranks(_by_hand, world_size=4):
        assert all(outcome.values()), outcome


def _meshes() -> tuple[tuple[str, ...], str]:
    """The mesh over which Accelerate 1.15 shards if it is told the number of replicas."""
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    whole = config.build_device_mesh("cpu")
    mesh = whole[tuple(config.fsdp_dim_names)]
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    with pytest.raises(commhooks.AttachError) as error:
        commhooks.attach(model, "allreduce", replicate_group=whole["dp_replicate"])
    assert dist.get_world_size() == mesh.size()
    return mesh.mesh_dim_names, str(error.value)


def test_the_mesh_of_its_plugin_is_one_that_is_refused(run_ranks: Any) -> None:
    """If this fails, Accelerate may leave the average over the replicas to a hook."""
    for names, message in run_ranks(_meshes, world_size=4):
        assert names == ("dp_replicate", "dp_shard_cp")
        assert "was sharded with a mesh of two dimensions" in message
