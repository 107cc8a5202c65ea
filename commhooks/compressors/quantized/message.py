"""What travels from one rank to another: the blocks of a share, and a part of everything that is not quantised."""

from dataclasses import dataclass

import torch

_ALIGNMENT = 8
"""Sections begin at multiples of the largest element, in bytes."""


@dataclass(frozen=True)
class Parts:
    """Views into messages: tensors of shape `(..., n)` for messages of shape `(..., bytes)`."""

    scales: torch.Tensor
    plain: torch.Tensor
    """Uncompressed gradients, in the dtype in which they travel."""
    codes: torch.Tensor
    flags: torch.Tensor
    """uint8, per compressed parameter: 1 if it has a gradient, else 0."""


class MessageFormat:
    """The sections of a message of `size` bytes.

    Args:
        scales: number and dtype of the scales.
        plain: number and dtype of the uncompressed elements.
        code_bytes: number of bytes of codes.
        flags: number of flags.

    Attributes:
        scales_at, codes_at: where these sections begin, in bytes.
    """

    def __init__(
        self, scales: tuple[int, torch.dtype], plain: tuple[int, torch.dtype], code_bytes: int, flags: int
    ) -> None:
        self._sections: list[tuple[int, int, torch.dtype]] = []
        self.size = 0
        for numel, dtype in (scales, plain, (code_bytes, torch.uint8), (flags, torch.uint8)):
            self._sections.append((self.size, numel * dtype.itemsize, dtype))
            self.size += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.scales_at, _, self.codes_at, _ = (at for at, _, _ in self._sections)

    def parts(self, messages: torch.Tensor) -> Parts:
        """The sections of `messages` (uint8, last dimension of `size` bytes) as views."""
        return Parts(*(messages[..., at : at + length].view(dtype) for at, length, dtype in self._sections))
