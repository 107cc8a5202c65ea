"""What travels from one rank to another: the blocks of a share, and a part of everything that is not quantised."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commhooks.comm.wire import all_finite
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.shares import Shares

_ALIGNMENT = 8
"""Sections begin at multiples of the largest element, in bytes."""


@dataclass(frozen=True, slots=True)
class Sections:
    """Views into messages: tensors of shape `(..., n)` for messages of shape `(..., bytes)`."""

    scales: torch.Tensor
    plain: torch.Tensor
    """Numbers that are not quantised, in the dtype in which they travel."""
    codes: torch.Tensor
    flags: torch.Tensor
    """uint8."""


class ShareMessages:
    """The messages of one mean over `world_size` ranks, allocated once.

    Args:
        code: how blocks are quantised.
        tensors: name and number of blocks of each, in the order of the blocks.
        dtype: of the numbers in blocks, and of the scales.
        largest: numbers beyond it are clamped; the rest of them is lost.
        plain: how many numbers travel as they are, and in which dtype.
        flags: how many flags travel.

    Attributes:
        plain: 1-D; before the mean write numbers here whose sum over the ranks is wanted.
        flags: uint8, 1-D; before the mean write flags here whose maximum over the ranks is wanted.
        sent: uint8, a message for each rank.
        mean: uint8, the message for all ranks with what this one has averaged.
        in_sent, in_mean: their sections.
        most: the largest scale.
        size: of a message, in bytes.
        scales_at, codes_at: where these sections begin, in bytes.
    """

    def __init__(
        self,
        code: BlockCode,
        tensors: Sequence[tuple[str, int]],
        dtype: torch.dtype,
        world_size: int,
        device: torch.device,
        *,
        largest: float,
        plain: tuple[int, torch.dtype],
        flags: int,
    ) -> None:
        self.code, self.dtype, self.world_size = code, dtype, world_size
        self.most = code.largest_scale(largest, dtype)
        self.shares = Shares(tensors, world_size, device)
        blocks, (numel, plain_dtype) = self.shares.size, plain
        each_plain, each_flags = -(-numel // world_size), -(-flags // world_size)
        self._sections: list[tuple[int, int, torch.dtype]] = []
        self.size = 0
        for count, own in (
            (blocks, dtype),
            (each_plain, plain_dtype),
            (blocks * code.block_bytes, torch.uint8),
            (each_flags, torch.uint8),
        ):
            self._sections.append((self.size, count * own.itemsize, own))
            self.size += -(-count * own.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.scales_at, _, self.codes_at, _ = (at for at, _, _ in self._sections)
        self.sent = torch.zeros(world_size, self.size, dtype=torch.uint8, device=device)
        self.mean = torch.zeros(self.size, dtype=torch.uint8, device=device)
        self.in_sent, self.in_mean = self.sections(self.sent), self.sections(self.mean)
        self._plain = torch.zeros(world_size, each_plain, dtype=plain_dtype, device=device)
        self._flags = torch.zeros(world_size, each_flags, dtype=torch.uint8, device=device)
        self.plain = self._plain.view(-1)[:numel]
        self.flags = self._flags.view(-1)[:flags]

    def sections(self, messages: torch.Tensor) -> Sections:
        """The sections of `messages` (uint8, last dimension of `size` bytes) as views."""
        return Sections(*(messages[..., at : at + length].view(dtype) for at, length, dtype in self._sections))

    def put_plain_and_flags(self) -> None:
        """Write what travels beside the blocks into the messages to all ranks."""
        self.in_sent.plain.copy_(self._plain)
        self.in_sent.flags.copy_(self._flags)

    def reduce_plain_and_flags(self, arrived: torch.Tensor) -> None:
        """Write the sums, in the order of the ranks, and the maxima of what has arrived beside the blocks into
        `mean`."""
        shares, mean = self.sections(arrived), self.in_mean
        total = torch.zeros(mean.plain.shape, dtype=self.dtype, device=self.mean.device)
        for rank in range(self.world_size):
            total.add_(shares.plain[rank])
        mean.plain.copy_(total)
        mean.flags.copy_(shares.flags.amax(0))


class Averaged:
    """The averages of all shares: the same bytes on every rank.

    Args:
        means: from each rank its `mean`.

    Attributes:
        finite: 0-dim bool: all of it is finite. What is not is NaN, block by block.
        plain: the sums of the numbers that travelled as they are, 1-D.
        flags: the maxima of the flags, uint8, 1-D.
    """

    def __init__(self, messages: ShareMessages, means: torch.Tensor) -> None:
        self.means = means
        self.sections = messages.sections(means)
        self.finite = all_finite(self.sections.scales) & all_finite(self.sections.plain)
        self.plain = self.sections.plain.reshape(-1)[: messages.plain.numel()]
        self.flags = self.sections.flags.reshape(-1)[: messages.flags.numel()]
