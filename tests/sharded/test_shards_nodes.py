"""What leaves a machine of several ranks: counted by real ranks, and by simulated links."""

import math
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import commhooks
from commhooks import Shards
from commhooks.compressors.quantized.mean import BlockCode
from tests.sharded.shards_links import Links, Rank
from tests.support.features import custom_collectives

FEATURES = 512  # one unit of 512 x 512 weights: 1 MB in float32


def _sent_between_nodes(ranks_per_node: int | None) -> dict[str, float]:
    """Return the bytes of this rank in a step with one gather. A counted byte stands for
    2 (P - 1) / P bytes on the wire, with P peers.
    """
    model = fully_shard(torch.nn.Linear(FEATURES, FEATURES, bias=False))
    shards = Shards(ranks_per_node=ranks_per_node)
    hook = commhooks.attach(model, None, shards=shards)
    model(torch.ones(1, FEATURES)).sum().backward()
    stats = hook.stats()["shards"]
    assert (stats["gathers"], stats["scatters"]) == (1, 1)
    return stats


@custom_collectives
def test_two_nodes_of_two_count_what_they_send(run_ranks: Any) -> None:
    code = BlockCode(8, 128)
    numel = FEATURES**2
    message = code.blocks_of(numel // 4) * (code.block_bytes + 4)
    for stats in run_ranks(_sent_between_nodes, 2, world_size=4):
        # A rank sends its message to the other node for the weights, and one for the gradients.
        # Two peers: a counted byte is one byte on the wire.
        assert stats["bytes_sent"] == pytest.approx(2 * message, rel=1e-3)
        # inside: the gradients as they are, and the codes of all weights
        expected = numel * 4 / 2 + 2 * message
        assert stats["bytes_inside_nodes"] == pytest.approx(expected, rel=1e-3)
    for stats in run_ranks(_sent_between_nodes, None, world_size=4):
        assert stats["bytes_inside_nodes"] == 0


MACHINES = {
    "2 x 2": [[0, 1], [2, 3]],
    "2 x 8": [[*range(8)], [*range(8, 16)]],
    "3 x 2, ranks in turn": [[0, 3], [1, 4], [2, 5]],
}
NUMEL = 4096
"""Of a rank's shard: 16 kB in float32."""


@pytest.mark.parametrize("between_nodes", [True, False])
@pytest.mark.parametrize("name", MACHINES)
def test_what_crosses_the_links_of_machines(name: str, between_nodes: bool) -> None:
    """Each message crosses once between two machines, and all ranks get the same weights."""
    machines = MACHINES[name]
    links = Links(machines)
    ranks = links.ranks
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(ranks, NUMEL, generator=generator)
    gradients = torch.randn(ranks, ranks * NUMEL, generator=generator)

    def work(rank: int) -> tuple[torch.Tensor, int, torch.Tensor]:
        unit = Rank(links, rank, NUMEL, between_nodes=between_nodes)
        gathered = unit.gather(weights[rank])
        links.wait()
        left = links.left_by(0)
        return gathered, left, unit.scatter(gradients[rank])

    results = links.run(work)
    mean = gradients.mean(0).view(ranks, NUMEL)
    for rank, (gathered, _, scattered) in enumerate(results):
        assert torch.equal(gathered, results[0][0])
        assert (gathered - weights.view(-1)).abs().max() < weights.abs().max() / 127
        assert (scattered - mean[rank]).abs().max() < gradients.abs().max() / 127
    left_by_gather = results[0][1]
    left_by_scatter = links.left_by(0) - left_by_gather
    in_float32 = (ranks - 1) / ranks * ranks * NUMEL * 4  # a ring of FSDP2's
    local = len(machines[0])
    message = math.ceil(NUMEL / 128) * (128 + 4)
    copies = 1 if between_nodes else local
    assert left_by_gather == left_by_scatter == copies * (ranks - local) * message
    if name == "2 x 8":
        assert (
            left_by_scatter < 0.14 * in_float32 if between_nodes else left_by_scatter > in_float32
        )
