"""The blocks of a bucket are divided among the ranks equally, and in the same way for every layout."""

import pytest
import torch

from commhooks import Int8Compress
from commhooks.compressors.quantized.exchange import Int8Compressor
from commhooks.compressors.quantized.mean import Shares
from tests.support.models import same_bits
from tests.support.simulation import SimulatedRanks

PARAMETERS = [("a", 1), ("layers.0.weight", 100), ("b", 3), ("layers.1.weight", 101)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_every_block_has_one_owner_and_no_rank_has_many_more(world_size: int) -> None:
    shares = Shares(PARAMETERS, world_size, torch.device("cpu"))
    blocks = sum(count for _, count in PARAMETERS)
    assert sum(shares.counts) == blocks and max(shares.counts) == shares.size
    assert shares.size <= blocks / world_size + len(PARAMETERS)
    found = shares.blocks.view(-1)
    assert sorted(found[found < blocks].tolist()) == list(range(blocks))
    assert torch.equal(found[shares.places], torch.arange(blocks))
    for rank, count in enumerate(shares.counts):
        assert bool((shares.blocks[rank, :count] < blocks).all())
        assert bool((shares.blocks[rank, count:] == blocks).all()), "padded with the empty block"


def test_a_parameter_is_divided_equally_wherever_its_name_begins() -> None:
    for name in "abcdefgh":
        for blocks, world_size in [(10, 4), (64, 8), (3, 5)]:
            counts = Shares([(name, blocks)], world_size, torch.device("cpu")).counts
            assert max(counts) - min(counts) <= 1
    first = [Shares([(f"layers.{i}.bias", 1)], 4, torch.device("cpu")).pieces[0].owner for i in range(200)]
    assert min(first.count(rank) for rank in range(4)) > 25, "small parameters do not meet at one rank"


def _averages(names: list[str], world_size: int) -> dict[str, torch.Tensor]:
    """Averages and residuals after some steps, with the parameters in this order in one bucket."""
    shapes = {"a": (6, 11), "b": (40, 2), "c": (3, 3, 9), "d": (10,)}
    ranks = SimulatedRanks(
        lambda: Int8Compressor(Int8Compress(block_size=16)), world_size, {n: torch.zeros(shapes[n]) for n in names}
    )
    found: dict[str, torch.Tensor] = {}
    for step in range(5):
        buckets = []
        for rank in range(world_size):
            noise = {n: torch.Generator().manual_seed(1000 * step + 10 * rank + ord(n)) for n in names}
            buckets.append(torch.cat([torch.randn(shapes[n], generator=noise[n]).flatten() for n in names]))
        assert ranks.step(buckets)
        found |= {slot.name: slot.of(buckets[0]).clone() for slot in ranks.layout.slots}
    for rank, state in enumerate(ranks.states):
        found |= {f"{name} of rank {rank}": residual for name, residual in state["residual"].items()}
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_another_layout_changes_no_bit(world_size: int) -> None:
    with torch.no_grad():
        together = _averages(["a", "b", "c", "d"], world_size)
        for names in (["d", "c", "a", "b"], ["a"], ["b", "d"], ["c"]):
            found = _averages(names, world_size)
            assert len(found) > len(names)
            assert all(same_bits(value, together[name]) for name, value in found.items())
