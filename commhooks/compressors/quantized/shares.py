"""Which rank averages which block.

The blocks of a tensor are divided among the ranks as equally as possible: each rank has one piece of it, or none. The
division depends on the tensor's name and on the number of ranks only: in another bucket layout every block has the same
owner, and nothing changes.
"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch


class Piece(NamedTuple):
    """Consecutive blocks of one tensor with one owner."""

    tensor: int
    """Its number among the tensors that are averaged together."""
    first: int
    """The first block, counted in the tensor."""
    blocks: int
    owner: int
    """The rank that averages them."""
    place: int
    """Of the first block, in the owner's share."""


class Shares:
    """The blocks of several tensors, divided among the ranks. What a rank averages is its share.

    Args:
        tensors: name and number of blocks of each. A rank has `blocks / world_size` of them, rounded up or down. The
            name decides where the division begins, so that small tensors do not all meet at one rank.

    Attributes:
        pieces: in the order of the blocks.
        counts: per rank, the number of blocks in its share.
        size: blocks in each share as it is sent: shorter ones are padded with the empty block.
        places: per block, its place among all shares laid one after another.
        blocks: `world_size x size`, the numbers of the blocks in each share; the empty block has the number after the
            last.
    """

    def __init__(self, tensors: Sequence[tuple[str, int]], world_size: int, device: torch.device) -> None:
        self.pieces: list[Piece] = []
        self.counts = [0] * world_size
        for number, (name, blocks) in enumerate(tensors):
            for i in range(min(blocks, world_size)):
                part = max(i, i * world_size // blocks)  # of fewer blocks than ranks: the parts that are not empty
                begin, end = (-(-each * blocks // world_size) for each in (part, part + 1))
                owner = (part + crc32(name.encode())) % world_size
                self.pieces.append(Piece(number, begin, end - begin, owner, self.counts[owner]))
                self.counts[owner] += end - begin
        self.size = max(self.counts)
        starts = [each.owner * self.size + each.place for each in self.pieces]
        runs = [torch.arange(at, at + each.blocks) for at, each in zip(starts, self.pieces, strict=True)]
        places = torch.cat(runs)
        blocks_in = torch.full((world_size * self.size,), len(places))
        blocks_in[places] = torch.arange(len(places))
        self.places, self.blocks = places.to(device), blocks_in.view(world_size, -1).to(device)
