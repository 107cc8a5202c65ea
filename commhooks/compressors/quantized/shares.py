"""Which rank averages which block.

The blocks of a parameter are divided among the ranks as equally as possible. The division depends on the parameter's
name and on the number of ranks only: in another bucket layout every block has the same owner, and nothing changes.
"""

import zlib
from collections.abc import Sequence

import torch


def owners(name: str, blocks: int, world_size: int) -> torch.Tensor:
    """The owner of each block of a parameter: each rank has `blocks / world_size` of them, rounded up or down. The
    name decides where the division begins, so that the small parameters of a bucket do not all meet at one rank."""
    first = zlib.crc32(name.encode())
    return (torch.arange(blocks) * world_size // max(1, blocks) + first % world_size) % world_size


class Shares:
    """The blocks of one bucket, divided among the ranks.

    Args:
        parameters: the name and the number of blocks of each compressed parameter, in the order of the blocks.

    Attributes:
        size: blocks in each share; shorter ones are padded with the empty block.
        blocks: `world_size x size`, the numbers of the blocks in each share; the empty block has the number after the
            last.
        counts: per rank, the number of blocks in its share that are not empty.
        places: per block, its place among all shares laid one after another.
    """

    def __init__(self, parameters: Sequence[tuple[str, int]], world_size: int, device: torch.device) -> None:
        owner = torch.cat([owners(name, blocks, world_size) for name, blocks in parameters])
        order = torch.argsort(owner, stable=True)
        self.counts: list[int] = torch.bincount(owner, minlength=world_size).tolist()
        self.size = max(self.counts)
        table = torch.full((world_size, self.size), len(owner))
        places = torch.empty_like(owner)
        for rank, mine in enumerate(order.split(self.counts)):
            table[rank, : len(mine)] = mine
            places[mine] = rank * self.size + torch.arange(len(mine))
        self.blocks, self.places = table.to(device), places.to(device)
