"""The mean of blocks over the ranks, quantised on the way.

    an all-to-all sends each rank the blocks of which it is the owner, quantised
    the owner averages them, quantises the mean, and an all-gather sends it to everyone
    all ranks decode the same bytes

The owner's own blocks do not travel and are not rounded.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.collective import Send
from commhooks.comm.wire import all_finite
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.message import MessageFormat, Parts
from commhooks.compressors.quantized.shares import Shares


@dataclass(frozen=True)
class Numbers:
    """So many numbers of one dtype."""

    numel: int
    dtype: torch.dtype


class QuantisedMean:
    """Averages messages of one kind over `world_size` ranks. The buffers are allocated once.

    Args:
        code: how blocks are quantised.
        units: the name and the number of blocks of each tensor, in the order of the blocks. The owners of blocks follow
            from the names.
        dtype: of the blocks.
        plain: the numbers that travel as they are.
        flags: how many flags travel.

    Attributes:
        plain: 1-D; before `over_ranks` write numbers here whose sum over the ranks is wanted.
        flags: uint8, 1-D; before `over_ranks` write flags here whose maximum over the ranks is wanted.
        codes, scales: this rank's blocks, quantised.
    """

    def __init__(
        self,
        code: BlockCode,
        units: Sequence[tuple[str, int]],
        dtype: torch.dtype,
        plain: Numbers,
        flags: int,
        *,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.code = code
        self.dtype = dtype
        self.world_size = world_size
        self.blocks = sum(blocks for _, blocks in units)
        self.shares = Shares(units, world_size, device)
        each_plain, each_flags = _share(plain.numel, world_size), _share(flags, world_size)
        self.format = MessageFormat(
            (self.shares.size, dtype),
            (each_plain, plain.dtype),
            self.shares.size * code.block_bytes,
            each_flags,
        )
        self.codes = torch.zeros(self.blocks + 1, code.block_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(self.blocks + 1, dtype=dtype, device=device)
        self.sent = torch.zeros(world_size, self.format.size, dtype=torch.uint8, device=device)
        """A message for each rank."""
        self._mean = torch.zeros(self.format.size, dtype=torch.uint8, device=device)
        self._plain = torch.zeros(world_size, each_plain, dtype=plain.dtype, device=device)
        self._flags = torch.zeros(world_size, each_flags, dtype=torch.uint8, device=device)
        self.plain = self._plain.view(-1)[: plain.numel]
        self.flags = self._flags.view(-1)[:flags]

    def over_ranks(
        self,
        blocks: torch.Tensor,
        rank: int,
        largest: float,
        *,
        what: str = "",
        last: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> Generator[Send, Any, "Averaged"]:
        """Average over the ranks: `averaged = yield from mean.over_ranks(...)`.

        Args:
            blocks: `blocks + 1 x block_size`; the last one is zero. Replaced by what rounding lost on this rank: the
                mean of it over the ranks is what the result lacks. It is complete when `meanwhile` is called.
            rank: this rank.
            largest: numbers beyond it are clamped; the rest of them is lost.
            what, last, meanwhile: see `Send`; the last two belong to the second collective.
        """
        of = f" of {what}" if what else ""
        own = blocks.index_select(0, self.shares.blocks[rank]).div_(self.world_size)
        self._quantise(blocks, largest)
        messages = yield Send(self.sent, f"shares{of}", op="all_to_all")
        self._average(self.format.parts(messages), own, rank, largest)

        def finish_lost() -> None:
            self._keep_rounding_of_mean(blocks, own, rank)
            if meanwhile is not None:
                meanwhile()

        messages = yield Send(self._mean, f"means{of}", op="gather", last=last, meanwhile=finish_lost)
        arrived = self.format.parts(messages)
        return Averaged(self, arrived, all_finite(arrived.scales) & all_finite(arrived.plain))

    def _quantise(self, blocks: torch.Tensor, largest: float) -> None:
        """Fill the messages to all ranks, and leave in `blocks` what their rounding lost."""
        inner = slice(0, self.blocks)
        self.code.quantise(blocks[inner], self.codes[inner], self.scales[inner], largest)
        sent, places = self.format.parts(self.sent), self.shares.blocks.view(-1)
        sent.scales.copy_(self.scales.index_select(0, places).view_as(sent.scales))
        sent.codes.copy_(self.codes.index_select(0, places).view_as(sent.codes))
        sent.plain.copy_(self._plain)
        sent.flags.copy_(self._flags)

    def _average(self, arrived: Parts, own: torch.Tensor, rank: int, largest: float) -> None:
        """Average this rank's share over the ranks, in their order after its own part, and write it into the message
        to all ranks.

        Args:
            own: this rank's own part, exact, divided by the number of ranks. Replaced by what the rounding of the mean
                lost.
        """
        mean = self.format.parts(self._mean)
        plain = torch.zeros(mean.plain.shape, dtype=self.dtype, device=own.device)
        for other in range(self.world_size):
            plain.add_(arrived.plain[other])
            if other != rank:
                codes = arrived.codes[other].view(-1, self.code.block_bytes)
                self.code.add_dequantised(codes, arrived.scales[other] / self.world_size, own)
        self.code.quantise(own, mean.codes.view(-1, self.code.block_bytes), mean.scales, largest)
        mean.plain.copy_(plain)
        mean.flags.copy_(arrived.flags.amax(0))

    def _keep_rounding_of_mean(self, blocks: torch.Tensor, lost: torch.Tensor, rank: int) -> None:
        """Let `blocks` be, in this rank's share, what the rounding of the mean lost, times the number of ranks."""
        count = self.shares.counts[rank]
        blocks.index_copy_(0, self.shares.blocks[rank, :count], lost[:count].mul_(self.world_size))


class Averaged:
    """What has arrived: the same bytes on every rank.

    Attributes:
        finite: 0-dim bool: all of it is finite. What is not is NaN, block by block.
        plain: the sums of the numbers that travelled as they are, 1-D.
        flags: the maxima of the flags, uint8, 1-D.
    """

    def __init__(self, mean: QuantisedMean, arrived: Parts, finite: torch.Tensor) -> None:
        self.finite = finite
        self.plain = arrived.plain.reshape(-1)[: mean.plain.numel()]
        self.flags = arrived.flags.reshape(-1)[: mean.flags.numel()]
        self._mean = mean
        self._arrived = arrived

    def decode(self, out: torch.Tensor) -> torch.Tensor:
        """Write the averaged blocks to `out` (`blocks x block_size`) and return it."""
        code, places = self._mean.code, self._mean.shares.places
        codes = self._arrived.codes.reshape(-1, code.block_bytes).index_select(0, places)
        return code.dequantise(codes, self._arrived.scales.reshape(-1).index_select(0, places), out)


def _share(numel: int, world_size: int) -> int:
    return -(-numel // world_size)
