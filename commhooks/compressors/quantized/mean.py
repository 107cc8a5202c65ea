"""The mean over the ranks, quantised on the way.

Delta is what a rank has to give: its numbers plus what was lost of earlier ones. It is cut into blocks, and each block
has an owner among the ranks.
"""

from collections.abc import Generator
from typing import Any, Protocol

import torch

from commhooks.comm.collectives import Send
from commhooks.compressors.quantized.messages import Averaged, ShareMessages
from commhooks.gradients.loss_scale import LossScale

Residuals = dict[str, torch.Tensor]
"""By name, flat in memory order."""
Good = torch.Tensor | bool
"""The answer to a `Verdict`."""


class BlockKernel(Protocol):
    """The arithmetic on the blocks of some tensors in one buffer. `TorchKernel` works on any device, `NativeKernel` on
    the CPU, in fewer passes: the same operations in the same order, so that not one bit differs."""

    messages: ShareMessages
    rank: int

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        """delta = what is in the buffer `flat` + factor * residual."""

    def quantise(self) -> None:
        """Write the blocks that others average into `messages.sent`. What rounding loses of them stays in delta."""

    def average(self, arrived: torch.Tensor) -> None:
        """Average this rank's share: its own part, which is not rounded, then the others in the order of the ranks.
        Write the mean, quantised, into `messages.mean`. What rounding loses of it stays in delta, times the number of
        ranks."""

    def store(
        self, averaged: Averaged, flat: torch.Tensor, residuals: Residuals, factor: LossScale, good: Good
    ) -> None:
        """Keep what is in delta as residuals where `good`, and write the averages into the buffer.

        A tensor without a flag keeps its residual, and its average is zero. A residual that stays takes the factor if
        `good`.
        """


def mean_over_ranks(kernel: BlockKernel) -> Generator[Send, Any, Averaged]:
    """Average delta over the ranks: `averaged = yield from mean_over_ranks(kernel)`.

    Afterwards delta is what was lost on this rank. The mean of it over the ranks is what the result lacks.
    """
    messages = kernel.messages
    kernel.quantise()  # 1  each rank quantises what others average
    messages.put_plain_and_flags()
    arrived = yield Send(messages.sent, what="shares", op="all_to_all")  # 2  every block goes to its owner
    kernel.average(arrived)  # 3  the owner averages, and quantises the mean
    messages.reduce_plain_and_flags(arrived)
    means = yield Send(messages.mean, what="means", op="gather", last=True)  # 4
    return Averaged(messages, means)  # 5  all ranks decode the same bytes
