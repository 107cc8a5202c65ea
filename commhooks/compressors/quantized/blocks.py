"""Numbers as small integers with a scale per block.

A block of numbers x becomes codes q = round(x / scale), rounded to the nearest, ties to even, with scale = max |x| /
levels. A number that is not finite makes the scale of its block NaN, so that the whole block arrives as NaN.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from commhooks.gradients import precision

_PIECE = 2**20
"""Elements that the host works on at once, so that intermediate results stay in its cache."""


@dataclass(frozen=True)
class BlockCode:
    """How one block is coded. Blocks are the rows of a tensor `n x block_size`, their codes the rows of a uint8 tensor
    `n x block_bytes`, their scales a tensor of n elements of the dtype of the blocks."""

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

    def quantise(self, blocks: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, most: float) -> None:
        """Write `codes` and `scales`, and replace `blocks` by what is lost: blocks - codes * scales.

        Args:
            most: the largest scale; numbers beyond `levels` times it are clamped, and the rest of them is lost.
        """
        scales.copy_(self._scales(blocks, most))
        divisors = torch.where(scales == 0, 1, scales).unsqueeze(1)
        for at in self._pieces(blocks):
            whole = torch.div(blocks[at], divisors[at]).round_().clamp_(-self.levels, self.levels)
            # Not addcmul_: whether it rounds the product first depends on the processor. What arrives is rounded.
            blocks[at].sub_(whole * scales[at].unsqueeze(1))
            self._pack(whole, codes[at])

    def dequantise(self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write codes * scales to `out` (`n x block_size`, of the dtype of `scales`) and return it."""
        for at in self._pieces(out):
            self._unpack(codes[at], out[at]).mul_(scales[at].unsqueeze(1))
        return out

    def add_dequantised(self, codes: torch.Tensor, scales: torch.Tensor, total: torch.Tensor) -> None:
        """Add codes * scales to `total` (`n x block_size`)."""
        for at in self._pieces(total):
            total[at].add_(self._unpack(codes[at], torch.empty_like(total[at])).mul_(scales[at].unsqueeze(1)))

    def _scales(self, blocks: torch.Tensor, most: float) -> torch.Tensor:
        info = torch.finfo(blocks.dtype)
        top = torch.maximum(blocks.amax(1), blocks.amin(1).neg_())
        top.add_(top * 0)  # inf becomes NaN
        top.div_(self.levels).clamp_(max=most)  # NaN stays NaN
        # A denormal scale has few digits, and some devices take it for zero: such a block is not sent.
        return torch.where(top < info.tiny, 0, top)

    def _pack(self, whole: torch.Tensor, codes: torch.Tensor) -> None:
        """Write integers between -levels and levels as codes. `whole` may be changed."""
        if self.bits == 8:
            codes.view(torch.int8).copy_(whole)
            return
        low, high = whole.unflatten(1, (2, -1)).unbind(1)
        codes.copy_(low.add_(high, alpha=16).add_(8 * 17))

    def _unpack(self, codes: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The inverse of `_pack`, into the floating-point tensor `out`."""
        if self.bits == 8:
            return out.copy_(codes.view(torch.int8))
        low, high = out.unflatten(1, (2, -1)).unbind(1)
        low.copy_(codes & 15)
        high.copy_(codes >> 4)
        return out.sub_(8)

    def _pieces(self, blocks: torch.Tensor) -> Iterator[slice]:
        rows = len(blocks)
        step = max(1, _PIECE // self.block_size) if precision.is_host_readable(blocks.device) else max(1, rows)
        return (slice(at, at + step) for at in range(0, rows, step))
