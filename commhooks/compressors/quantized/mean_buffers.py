"""The messages for the mean of blocks over the ranks: what `QuantisedMean` and `NativeMean` have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commhooks.comm.wire import all_finite
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.message import MessageFormat, Parts
from commhooks.compressors.quantized.shares import Shares


@dataclass(frozen=True)
class Numbers:
    """So many numbers of one dtype."""

    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class MeanContents:
    """What is averaged together.

    Attributes:
        code: how blocks are quantised.
        units: the name and the number of blocks of each tensor, in the order of the blocks. The owners of blocks follow
            from the names.
        dtype: of the blocks.
        plain: the numbers that travel as they are.
        flags: how many flags travel.
    """

    code: BlockCode
    units: Sequence[tuple[str, int]]
    dtype: torch.dtype
    plain: Numbers
    flags: int

    @property
    def blocks(self) -> int:
        return sum(blocks for _, blocks in self.units)


class MeanBuffers:
    """The buffers for messages of one kind among `world_size` ranks, allocated once.

    Attributes:
        plain: 1-D; before `over_ranks` write numbers here whose sum over the ranks is wanted.
        flags: uint8, 1-D; before `over_ranks` write flags here whose maximum over the ranks is wanted.
        sent: uint8, a message for each rank.
        mean: uint8, the message for all ranks with what this one has averaged.
    """

    def __init__(self, contents: MeanContents, world_size: int, device: torch.device) -> None:
        plain, flags = contents.plain, contents.flags
        self.code = contents.code
        self.dtype = contents.dtype
        self.world_size = world_size
        self.shares = Shares(contents.units, world_size, device)
        each_plain, each_flags = _share(plain.numel, world_size), _share(flags, world_size)
        self.format = MessageFormat(
            (self.shares.size, self.dtype),
            (each_plain, plain.dtype),
            self.shares.size * self.code.block_bytes,
            each_flags,
        )
        self.sent = torch.zeros(world_size, self.format.size, dtype=torch.uint8, device=device)
        self.mean = torch.zeros(self.format.size, dtype=torch.uint8, device=device)
        self._plain = torch.zeros(world_size, each_plain, dtype=plain.dtype, device=device)
        self._flags = torch.zeros(world_size, each_flags, dtype=torch.uint8, device=device)
        self.plain = self._plain.view(-1)[: plain.numel]
        self.flags = self._flags.view(-1)[:flags]

    def put_beside(self) -> None:
        """Write what travels beside the blocks into the messages to all ranks."""
        sent = self.format.parts(self.sent)
        sent.plain.copy_(self._plain)
        sent.flags.copy_(self._flags)

    def average_beside(self, arrived: Parts) -> None:
        """Write the sums and maxima of what has arrived beside the blocks into `mean`, in the order of the ranks."""
        mean = self.format.parts(self.mean)
        plain = torch.zeros(mean.plain.shape, dtype=self.dtype, device=self.mean.device)
        for other in range(self.world_size):
            plain.add_(arrived.plain[other])
        mean.plain.copy_(plain)
        mean.flags.copy_(arrived.flags.amax(0))


class Arrived:
    """The averages of all shares: the same bytes on every rank.

    Args:
        messages: from each rank its `mean`.

    Attributes:
        finite: 0-dim bool: all of it is finite. What is not is NaN, block by block.
        plain: the sums of the numbers that travelled as they are, 1-D.
        flags: the maxima of the flags, uint8, 1-D.
    """

    def __init__(self, buffers: MeanBuffers, messages: torch.Tensor) -> None:
        self.parts = buffers.format.parts(messages)
        self.finite = all_finite(self.parts.scales) & all_finite(self.parts.plain)
        self.plain = self.parts.plain.reshape(-1)[: buffers.plain.numel()]
        self.flags = self.parts.flags.reshape(-1)[: buffers.flags.numel()]


def _share(numel: int, world_size: int) -> int:
    return -(-numel // world_size)
