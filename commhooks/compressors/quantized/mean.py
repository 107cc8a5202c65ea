"""The mean over the ranks, quantised on the way.

Delta is the input plus the residual of earlier steps. It is cut into blocks. Each block has an owner among the ranks,
which averages it.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch

from commhooks.comm.collectives import Send
from commhooks.comm.wire import all_finite
from commhooks.gradients.loss_scale import LossScale

Residuals = dict[str, torch.Tensor]
"""By name, flat in memory order."""
Good = torch.Tensor | bool
"""The answer to a `Verdict`."""
_ALIGNMENT = 8
"""Sections of messages begin at multiples of the largest element, in bytes."""


def mean_over_ranks(kernel: "BlockKernel") -> Generator[Send, Any, "Averaged"]:
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


class BlockKernel(Protocol):
    """The arithmetic on the blocks of some tensors in one buffer. `TorchKernel` works on any device, `NativeKernel` on
    the CPU, in fewer passes: the same operations in the same order, so that not one bit differs."""

    messages: "ShareMessages"
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
        self, averaged: "Averaged", flat: torch.Tensor, residuals: Residuals, factor: LossScale, good: Good
    ) -> None:
        """Keep what is in delta as residuals where `good`, and write the averages into the buffer.

        A tensor without a flag keeps its residual, times the factor if `good`, and its average is zero.
        """


@dataclass(frozen=True)
class BlockCode:
    """How a block of numbers x becomes integers: q = round(x / scale), ties to even, with scale = max |x| / levels.

    A number that is not finite makes the scale of its block NaN, so that the whole block arrives as NaN. Blocks are the
    rows of a tensor `n x block_size`, codes the rows of a uint8 tensor `n x block_bytes`, scales `n` numbers of the
    dtype of the blocks.
    """

    bits: int
    """8, or 4: two codes in a byte, elements i and i + block_size / 2 of the block."""
    block_size: int

    @property
    def levels(self) -> int:
        """Codes lie between -levels and levels."""
        return 127 if self.bits == 8 else 7

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bits // 8

    def blocks_of(self, numel: int) -> int:
        """Number of blocks that hold `numel` elements."""
        return -(-numel // self.block_size)

    def largest_scale(self, largest: float, dtype: torch.dtype) -> float:
        """The scale of blocks whose numbers are clamped to `largest`: a little less, so that `levels` times the scale
        does not exceed it by rounding."""
        return largest / self.levels * (1 - 4 * torch.finfo(dtype).eps)


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
    """The blocks of several tensors, divided among the ranks as equally as possible. What a rank averages is its share.

    The division depends on names and the number of ranks only: in another bucket layout every block has the same owner,
    and nothing changes.

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
    """The messages of one mean over `world_size` ranks, allocated once: the blocks of a share, and a part of everything
    that is not quantised.

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
