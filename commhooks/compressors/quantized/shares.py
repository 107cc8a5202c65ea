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


def pieces_of(tensors: Sequence[tuple[str, int]], world_size: int) -> list[Piece]:
    """Divide tensors, given as name and number of blocks. Each rank has `blocks / world_size` of them, rounded up or
    down. The name decides where the division begins, so that small tensors do not all meet at one rank."""
    found, filled = [], [0] * world_size
    for number, (name, blocks) in enumerate(tensors):
        for i in range(min(blocks, world_size)):
            part = max(i, i * world_size // blocks)  # with few blocks, the parts that have one
            begin, end = (-(-each * blocks // world_size) for each in (part, part + 1))
            owner = (part + crc32(name.encode())) % world_size
            found.append(Piece(number, begin, end - begin, owner, filled[owner]))
            filled[owner] += end - begin
    return found


class Shares:
    """The blocks of several tensors, divided among the ranks. What a rank averages is its share.

    Attributes:
        pieces: in the order of the blocks.
        size: blocks in each share; shorter ones are padded with the empty block.
        counts: per rank, the number of blocks in its share that are not empty.
        places: per block, its place among all shares laid one after another.
        blocks: `world_size x size`, the numbers of the blocks in each share; the empty block has the number after the
            last.
    """

    def __init__(self, tensors: Sequence[tuple[str, int]], world_size: int, device: torch.device) -> None:
        self.pieces = pieces_of(tensors, world_size)
        self.counts = [0] * world_size
        for piece in self.pieces:
            self.counts[piece.owner] += piece.blocks
        self.size = max(self.counts)
        starts = [each.owner * self.size + each.place for each in self.pieces]
        runs = [torch.arange(at, at + each.blocks) for at, each in zip(starts, self.pieces, strict=True)]
        places = torch.cat(runs)
        blocks = torch.full((world_size * self.size,), len(places))
        blocks[places] = torch.arange(len(places))
        self.places, self.blocks = places.to(device), blocks.view(world_size, -1).to(device)
