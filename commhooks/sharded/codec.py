"""Encode rows into messages, and decode them.

    row       | weight of layer 1      | bias | weight of layer 2 | bias |
    message   | scales of all blocks | codes of all blocks | both biases as they are |

Every kernel computes the same bits, and decoding is one product, so ranks may compute with
different kernels.
"""

import functools
import itertools

import torch

from commhooks.sharded.blocks import NewBlocks, TorchBlocks
from commhooks.sharded.layout import RowLayout
from commhooks.sharded.memory import Memory
from commhooks.sharded.native import native_blocks
from commhooks.sharded.parts import Part, PlainPart, Weigh, aligned


class Codec:
    """Encodes rows of one layout: `n x numel`. Messages are uint8, `n x message_bytes`.

    Args:
        scratch: memory for copies of rows.
        rows: the number of rows in a collective, at most.
        native: compute with the kernel of `check_native`.
    """

    def __init__(self, layout: RowLayout, scratch: Memory, *, rows: int, native: bool) -> None:
        self.layout = layout
        self._parts: list[Part] = []
        dtype = layout.dtype
        device = scratch.device
        if layout.form == "bf16":
            wire = torch.bfloat16
            self._parts.append(PlainPart(layout.compressed, dtype, wire, rows, device))
        else:
            by_torch = functools.partial(TorchBlocks, rows=rows)
            blocks: NewBlocks = native_blocks(device) if native else by_torch
            self._parts.append(blocks(layout.compressed, layout.code, dtype, scratch))
        if layout.exact:
            self._parts.append(PlainPart(layout.exact, dtype, dtype, rows, device))
        sizes = [aligned(part.nbytes) for part in self._parts]
        *self._starts, self.message_bytes = itertools.accumulate(sizes, initial=0)

    def encode(self, rows: torch.Tensor, messages: torch.Tensor) -> None:
        """Write `messages`. The rows may be overwritten."""
        if len(rows):
            for part, sections in self._sections(messages):
                part.encode(rows, sections)

    def decode(self, messages: torch.Tensor, rows: torch.Tensor) -> None:
        for part, sections in self._sections(messages):
            part.decode(sections, rows)

    def add(self, row: torch.Tensor, messages: torch.Tensor, own: int, weigh: Weigh) -> None:
        """Replace `row` (1-D) by a sum with the rows in `messages` but `own`; see `Part.add`."""
        for part, sections in self._sections(messages):
            part.add(row, sections, own, weigh)

    def _sections(self, messages: torch.Tensor) -> list[tuple[Part, torch.Tensor]]:
        return [
            (part, messages[:, start : start + part.nbytes])
            for start, part in zip(self._starts, self._parts, strict=True)
        ]
