"""Encode rows into messages, and decode them.

    row       | weight of layer 1      | bias | weight of layer 2 | bias |
    message   | scales of all blocks | codes of all blocks | both biases as they are |

Every kernel computes the same bits, and decoding is one product, so ranks may compute with
different kernels.
"""

import itertools
from collections.abc import Sequence

import torch

from commhooks.sharded.blocks import NativeBlocks, TorchBlocks
from commhooks.sharded.layout import RowLayout
from commhooks.sharded.memory import Memory
from commhooks.sharded.parts import Part, PlainPart, Weigh, aligned


class Codec:
    """Encodes the rows of one layout. A message is a uint8 tensor of `message_bytes`.

    Args:
        scratch: memory for copies of one row.
        native: compute with the C kernel, on the CPU.
    """

    def __init__(self, layout: RowLayout, scratch: Memory, *, native: bool) -> None:
        self.layout = layout
        self._parts: list[Part] = []
        if layout.form == "int8":
            kernel = NativeBlocks if native else TorchBlocks
            self._parts.append(kernel(layout.compressed, layout.code, layout.dtype, scratch))
        else:
            self._parts.append(PlainPart(layout.compressed, layout.dtype, torch.bfloat16))
        if layout.exact:
            self._parts.append(PlainPart(layout.exact, layout.dtype, layout.dtype))
        sizes = [aligned(part.nbytes) for part in self._parts]
        *self._starts, self.message_bytes = itertools.accumulate(sizes, initial=0)

    def encode(self, row: torch.Tensor, message: torch.Tensor) -> None:
        """Write `message`. The row may be overwritten."""
        for part, section in zip(self._parts, self._sections(message), strict=True):
            part.encode(row, section)

    def decode(self, message: torch.Tensor, row: torch.Tensor) -> None:
        for part, section in zip(self._parts, self._sections(message), strict=True):
            part.decode(section, row)

    def add(self, row: torch.Tensor, messages: Sequence[torch.Tensor], weigh: Weigh) -> None:
        """Replace `row` by a sum with the rows in `messages`; see `Part.add`."""
        of_messages = [self._sections(message) for message in messages]
        for number, part in enumerate(self._parts):
            part.add(row, [sections[number] for sections in of_messages], weigh)

    def _sections(self, message: torch.Tensor) -> list[torch.Tensor]:
        return [
            message[start : start + part.nbytes]
            for start, part in zip(self._starts, self._parts, strict=True)
        ]
