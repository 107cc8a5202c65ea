"""The mean of blocks over the ranks, quantised on the way.

    an all-to-all sends each rank the blocks of which it is the owner, quantised
    the owner averages them, quantises the mean, and an all-gather sends it to everyone
    all ranks decode the same bytes

The owner's own blocks do not travel and are not rounded.
"""

from collections.abc import Callable, Generator
from typing import Any

import torch

from commhooks.comm.collective import Send
from commhooks.compressors.quantized.mean_buffers import Arrived, MeanBuffers, MeanContents
from commhooks.compressors.quantized.message import Parts


class QuantisedMean(MeanBuffers):
    """Averages messages of one kind over the ranks, with torch, on any device.

    Attributes:
        codes, scales: this rank's blocks, quantised; the last block is empty.
    """

    def __init__(self, contents: MeanContents, world_size: int, device: torch.device) -> None:
        super().__init__(contents, world_size, device)
        rows = contents.blocks + 1
        self.codes = torch.zeros(rows, self.code.block_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(rows, dtype=self.dtype, device=device)

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
        messages = yield Send(self.sent, what=f"shares{of}", op="all_to_all")
        self._average(self.format.parts(messages), own, rank, largest)

        def finish_lost() -> None:
            self._keep_rounding_of_mean(blocks, own, rank)
            if meanwhile is not None:
                meanwhile()

        messages = yield Send(self.mean, what=f"means{of}", op="gather", last=last, meanwhile=finish_lost)
        return Averaged(self, messages)

    def _quantise(self, blocks: torch.Tensor, largest: float) -> None:
        """Fill the messages to all ranks, and leave in `blocks` what their rounding lost."""
        self.code.quantise(blocks[:-1], self.codes[:-1], self.scales[:-1], largest)
        sent, places = self.format.parts(self.sent), self.shares.blocks.view(-1)
        sent.scales.copy_(self.scales.index_select(0, places).view_as(sent.scales))
        sent.codes.copy_(self.codes.index_select(0, places).view_as(sent.codes))
        self.put_beside()

    def _average(self, arrived: Parts, own: torch.Tensor, rank: int, largest: float) -> None:
        """Average this rank's share over the ranks, in their order after its own part, and write it into the message
        to all ranks.

        Args:
            own: this rank's own part, exact, divided by the number of ranks. Replaced by what the rounding of the mean
                lost.
        """
        mean = self.format.parts(self.mean)
        for other in range(self.world_size):
            if other != rank:
                codes = arrived.codes[other].view(-1, self.code.block_bytes)
                self.code.add_dequantised(codes, arrived.scales[other] / self.world_size, own)
        self.code.quantise(own, mean.codes.view(-1, self.code.block_bytes), mean.scales, largest)
        self.average_beside(arrived)

    def _keep_rounding_of_mean(self, blocks: torch.Tensor, lost: torch.Tensor, rank: int) -> None:
        """Let `blocks` be, in this rank's share, what the rounding of the mean lost, times the number of ranks."""
        count = self.shares.counts[rank]
        blocks.index_copy_(0, self.shares.blocks[rank, :count], lost[:count].mul_(self.world_size))


class Averaged(Arrived):
    """What has arrived, as blocks."""

    def __init__(self, mean: QuantisedMean, messages: torch.Tensor) -> None:
        super().__init__(mean, messages)
        self._mean = mean

    def decode(self, out: torch.Tensor) -> torch.Tensor:
        """Write the averaged blocks to `out` (`blocks x block_size`) and return it."""
        code, places = self._mean.code, self._mean.shares.places
        codes = self.parts.codes.reshape(-1, code.block_bytes).index_select(0, places)
        return code.dequantise(codes, self.parts.scales.reshape(-1).index_select(0, places), out)
