"""Compressed shards on the simulated accelerator: the work of FSDP2's streams is ordered, no buffer
is used again too early, and the host waits for nothing.
"""

from typing import Any

import pytest
import torch

import commhooks
from tests.engine.test_simulated_accelerator import _wrong
from tests.support import sharded
from tests.support.ddp_steps import descend
from tests.support.features import custom_collectives, fully_shard_on_gloo
from tests.support.simulated_accelerator import DEVICE, Accelerator

pytestmark = [fully_shard_on_gloo, custom_collectives, pytest.mark.timeout(120)]


def _trained(ranks_per_node: int | None, prefetch: bool) -> list[str]:
    def train(accelerator: Accelerator) -> Any:
        world_size = torch.distributed.get_world_size()
        mesh = sharded.mesh_of(1, world_size)["shard"]
        model = sharded.shard(sharded.Prescribed(torch.float32).to(DEVICE), mesh)
        shards = commhooks.Shards(block_size=16, ranks_per_node=ranks_per_node)
        hook = commhooks.attach(model, None, shards=shards)
        for step in range(3):
            gradients = {
                name: gradient.to(DEVICE)
                for name, gradient in sharded.random_gradients(step, dtype=torch.float32).items()
            }
            model.zero_grad(set_to_none=True)
            del accelerator.host_waits[:]
            if prefetch:
                for unit in (model.first, model.even):
                    unit.unshard(async_op=True)  # type: ignore[operator, union-attr]
            model(gradients).backward()
            assert accelerator.host_waits == [] or step < 2, accelerator.host_waits
            descend(model)
        assert hook.stats()["compression_rate"] > 1.5
        return [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]

    return _wrong(train, seed=0)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "prefetch"), [(2, None, False), (2, None, True), (4, 2, False)]
)
def test_shards_on_streams_are_ordered(
    run_ranks: Any, world_size: int, ranks_per_node: int | None, prefetch: bool
) -> None:
    ranks = run_ranks(_trained, ranks_per_node, prefetch, world_size=world_size)
    assert not any(ranks), ranks
