"""Compute the quantised mean over the ranks of delta, in blocks.

Delta is the input plus the residual of earlier steps. The owner of a block is the rank that
averages it.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import torch

from commhooks.comm.collectives import Send
from commhooks.comm.packing import all_finite
from commhooks.gradients import precision
from commhooks.gradients.loss_scale import LossScale

Residuals = dict[str, torch.Tensor]
"""By name, flat in memory order."""
Good = torch.Tensor | bool
"""The answer to a `Verdict`."""
_ALIGNMENT = 8
"""Sections of a message begin at multiples of this many bytes, the size of the largest element."""


def mean_over_ranks(kernel: "BlockKernel") -> Generator[Send, Any, "Averaged"]:
    """Average delta over the ranks: `averaged = yield from mean_over_ranks(kernel)`.

    Afterwards delta is the rounding error of this rank. The mean of these errors over the ranks is
    the difference between the exact mean and the result.
    """
    messages = kernel.messages
    kernel.quantise()  # 1. quantise the blocks that other ranks own
    messages.put_plain_and_flags()
    # 2. send every block to its owner
    arrived = yield Send(messages.sent, what="shares", op="all_to_all")
    kernel.average(arrived)  # 3. average the blocks that this rank owns, and quantise the mean
    messages.reduce_plain_and_flags(arrived)
    # 4. send the mean to all ranks
    means = yield Send(messages.mean, what="means", op="gather", last=True)
    return Averaged(messages, means)  # 5. all ranks decode the same bytes


class BlockKernel(Protocol):
    """Defines the arithmetic on the blocks of some tensors in one buffer.

    `TorchKernel` runs on any device. `NativeKernel` (CPU) and `TritonKernel` (CUDA) need fewer
    passes over the memory, and compute the same bits.
    """

    messages: "ShareMessages"
    rank: int

    def load(self, flat: torch.Tensor, residuals: Residuals, factor: LossScale) -> None:
        """Compute delta = gradient + factor * residual, with gradients from the buffer `flat`.

        Write a flag per tensor to `messages.flags`: 1 if its gradient is not zero, else 0.
        """

    def quantise(self) -> None:
        """Write other owners' blocks into `messages.sent`; leave the rounding errors in delta."""

    def average(self, arrived: torch.Tensor) -> None:
        """Average this rank's share, and write the quantised mean into `messages.mean`.

        First come its own blocks, not rounded, then the received ones (on the CPU in the order of
        the ranks). Leave the rounding error of the mean, times the world size, in delta.
        """

    def store(
        self,
        averaged: "Averaged",
        flat: torch.Tensor,
        residuals: Residuals,
        factor: LossScale,
        good: Good,
    ) -> None:
        """If `good`, store delta as the residuals. Write the averages into the buffer.

        A tensor without a flag on any rank keeps its residual, times the factor if `good`, and its
        average is zero.
        """


@dataclass(frozen=True)
class BlockCode:
    """Encodes a block of numbers x as integers round(x / scale), ties to even.

    The scale is max |x| / levels. If a number is not finite, the scale of its block is NaN, and the
    whole block decodes to NaN.

    Blocks are rows of a tensor `n x block_size`, codes are rows of a uint8 tensor `n x
    block_bytes`, and scales are `n` numbers in the dtype of the blocks.
    """

    bits: int
    """8, or 4 with two codes per byte: elements i and i + block_size / 2 of the block."""
    block_size: int

    @property
    def levels(self) -> int:
        return 127 if self.bits == 8 else 7

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.bits // 8

    def blocks_of(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def largest_scale(self, largest: float, dtype: torch.dtype) -> float:
        """Return the scale at which a block is clamped to `largest`.

        It is slightly less than `largest / levels`, so that rounding does not make `levels * scale`
        exceed `largest`.
        """
        return largest / self.levels * (1 - 4 * torch.finfo(dtype).eps)


class Piece(NamedTuple):
    """Describes consecutive blocks of one tensor with the same owner."""

    tensor: int
    first: int
    """Index of the first block in the tensor."""
    blocks: int
    owner: int
    place: int
    """Index of the first block in the owner's share."""


class Shares:
    """Divides the blocks of several tensors among the ranks, as equally as possible.

    `tensors`: the name and the number of blocks of each.

    The owner of a block depends only on the tensor's name and the world size, so that bits do not
    depend on the bucket layout. The name selects the first owner, so that small tensors do not all
    have the same owner.

    Attributes:
        counts: number of blocks in each share.
        size: number of blocks in each share as sent; shorter shares are padded with the empty
            block.
        places: the index of each block in the concatenated shares.
        blocks: `world_size x size`, the indices of the blocks in each share. The empty block has
            the last index.
    """

    def __init__(
        self, tensors: Sequence[tuple[str, int]], world_size: int, device: torch.device
    ) -> None:
        self.pieces: list[Piece] = []
        self.counts = [0] * world_size
        # Divide each tensor into as many parts as there are ranks, and give part i to rank i plus a
        # hash of the name.
        for number, (name, blocks) in enumerate(tensors):
            for i in range(min(blocks, world_size)):
                # skips the empty parts if there are fewer blocks than ranks
                part = max(i, i * world_size // blocks)
                begin = -(-part * blocks // world_size)
                end = -(-(part + 1) * blocks // world_size)
                owner = (part + crc32(name.encode())) % world_size
                self.pieces.append(Piece(number, begin, end - begin, owner, self.counts[owner]))
                self.counts[owner] += end - begin
        self.size = max(self.counts)
        starts = [piece.owner * self.size + piece.place for piece in self.pieces]
        runs = [
            torch.arange(start, start + piece.blocks)
            for start, piece in zip(starts, self.pieces, strict=True)
        ]
        places = torch.cat(runs)
        blocks_in = torch.full((world_size * self.size,), len(places))
        blocks_in[places] = torch.arange(len(places))
        self.places = places.to(device)
        self.blocks = blocks_in.view(world_size, -1).to(device)


@dataclass(frozen=True, slots=True)
class Sections:
    """Holds views of messages: tensors of shape `(..., n)` for messages of shape `(..., bytes)`."""

    scales: torch.Tensor
    plain: torch.Tensor
    """Numbers that are not quantised, in their wire dtype."""
    codes: torch.Tensor
    flags: torch.Tensor  # uint8


class ShareMessages:
    """Holds the messages of one mean over `world_size` ranks, allocated once.

    A message has the blocks of one share, and an equal part of everything that is not quantised.

    Args:
        tensors: name and number of blocks, in the order of the blocks.
        dtype: the dtype of blocks and scales.
        largest: clamp larger numbers to this; the excess is a rounding error.
        plain: number and wire dtype of the elements that are not quantised.

    Attributes:
        plain: 1-D; write numbers here to get their sum over the ranks.
        flags: uint8, 1-D; write flags here to get their maximum over the ranks.
        sent: uint8, one message for each rank.
        mean: uint8, one message for all ranks, with the averages of this rank's share.
        most: the largest scale.
        size: bytes of a message.
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
        self.code = code
        self.dtype = dtype
        self.world_size = world_size
        self.most = code.largest_scale(largest, dtype)
        self.shares = Shares(tensors, world_size, device)
        blocks = self.shares.size
        numel, plain_dtype = plain
        plain_per_rank = -(-numel // world_size)
        flags_per_rank = -(-flags // world_size)
        self._sections: list[tuple[int, int, torch.dtype]] = []
        self.size = 0
        for count, section_dtype in (
            (blocks, dtype),
            (plain_per_rank, plain_dtype),
            (blocks * code.block_bytes, torch.uint8),
            (flags_per_rank, torch.uint8),
        ):
            nbytes = count * section_dtype.itemsize
            self._sections.append((self.size, nbytes, section_dtype))
            self.size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.scales_at, _, self.codes_at, _ = (at for at, _, _ in self._sections)
        self.sent = torch.zeros(world_size, self.size, dtype=torch.uint8, device=device)
        self.mean = torch.zeros(self.size, dtype=torch.uint8, device=device)
        self.in_sent = self.sections(self.sent)
        self.in_mean = self.sections(self.mean)
        self._plain = torch.zeros(world_size, plain_per_rank, dtype=plain_dtype, device=device)
        self._flags = torch.zeros(world_size, flags_per_rank, dtype=torch.uint8, device=device)
        self.plain = self._plain.view(-1)[:numel]
        self.flags = self._flags.view(-1)[:flags]

    def sections(self, messages: torch.Tensor) -> Sections:
        return Sections(
            *(messages[..., at : at + length].view(dtype) for at, length, dtype in self._sections)
        )

    def put_plain_and_flags(self) -> None:
        self.in_sent.plain.copy_(self._plain)
        self.in_sent.flags.copy_(self._flags)

    def reduce_plain_and_flags(self, arrived: torch.Tensor) -> None:
        """Write the sums of the plain numbers and the maxima of the flags into `mean`.

        On the CPU the numbers are added in rank order.
        """
        shares = self.sections(arrived)
        mean = self.in_mean
        if precision.is_host_readable(arrived.device):
            total = torch.zeros(mean.plain.shape, dtype=self.dtype)
            for rank in range(self.world_size):
                total.add_(shares.plain[rank])
        else:
            total = sum_in_pairs(shares.plain.to(self.dtype, copy=True))
        mean.plain.copy_(total)
        mean.flags.copy_(shares.flags.amax(0))


def sum_in_pairs(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over the first dimension of `parts`, which is used as scratch memory.

    One operator adds the second half of the ranks to the first half, whose size is a power of two,
    then the next operator halves again. `torch.sum` would be one operator, but on an accelerator
    its order, and so its bits, would depend on the bucket layout.
    """
    while len(parts) > 1:
        half = 2 ** ((len(parts) - 1).bit_length() - 1)
        parts[: len(parts) - half].add_(parts[half:])
        parts = parts[:half]
    return parts[0]


class Averaged:
    """Holds the averages of all shares, the same bytes on every rank.

    `means`: the messages `mean` of all ranks.

    Attributes:
        finite: whether all scales and plain numbers are finite (0-dim bool tensor).
        plain: the sums of the plain numbers, 1-D.
        flags: the maxima of the flags, uint8, 1-D.
    """

    def __init__(self, messages: ShareMessages, means: torch.Tensor) -> None:
        self.means = means
        self.sections = messages.sections(means)
        self.finite = all_finite(self.sections.scales) & all_finite(self.sections.plain)
        self.plain = self.sections.plain.reshape(-1)[: messages.plain.numel()]
        self.flags = self.sections.flags.reshape(-1)[: messages.flags.numel()]
