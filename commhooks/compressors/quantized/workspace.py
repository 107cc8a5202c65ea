"""The buffers for quantising the buckets of one layout, allocated once. They belong to one session and are never
saved."""

from collections.abc import Sequence
from functools import cached_property

import torch

from commhooks.compressors.named_views import NamedViews
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.message import MessageFormat
from commhooks.compressors.quantized.plan import BlockPlan
from commhooks.compressors.quantized.shares import Shares
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.precision import compute_dtype


class Workspace:
    """Buffers of one bucket layout, on its device.

    Every compressed parameter begins a new block, so that blocks do not depend on the layout. After the last block
    comes an empty one, of zeros, with which shares are padded.

    Args:
        plans: one per slot of the layout, in order.
        wire_dtype: the dtype in which uncompressed elements travel.
    """

    def __init__(
        self, layout: BucketLayout, plans: Sequence[BlockPlan], code: BlockCode, wire_dtype: torch.dtype
    ) -> None:
        self.layout = layout
        self.code = code
        self.wire_dtype = wire_dtype
        self.dtype = compute_dtype(layout.dtype)
        pairs = list(zip(layout.slots, plans, strict=True))
        self.slots = [slot for slot, plan in pairs if plan.compressed]
        self.block_counts = [plan.blocks for _, plan in pairs if plan.compressed]
        self.plain = [slot for slot, plan in pairs if not plan.compressed]
        self.blocks = sum(self.block_counts)
        self.delta = self._new_blocks()
        """Gradient plus residual, then what is left of it, then the averaged gradient: `blocks + 1` rows."""
        self.codes = torch.zeros(self.blocks + 1, code.block_bytes, dtype=torch.uint8, device=layout.device)
        self.scales = torch.zeros(self.blocks + 1, dtype=self.dtype, device=layout.device)
        starts = [code.block_size * sum(self.block_counts[:i]) for i in range(len(self.block_counts))]
        self.spans = [(slot, at) for slot, at in zip(self.slots, starts, strict=True)]
        """Per compressed parameter, where its elements begin in the flat blocks."""
        ends = [*starts[1:], code.block_size * self.blocks]
        filled = [at + slot.numel for slot, at in self.spans]
        self.padding = [(begin, end) for begin, end in zip(filled, ends, strict=True) if begin < end]
        """The rest of the last blocks, in the flat blocks."""
        counts = torch.tensor(self.block_counts)
        self.parameter_of = torch.arange(len(counts)).repeat_interleave(counts).to(layout.device)
        """Per block, the number of its parameter among the compressed ones."""
        self._routes: dict[int, Route] = {}

    @cached_property
    def residual_blocks(self) -> torch.Tensor:
        return self._new_blocks()

    @cached_property
    def residuals(self) -> NamedViews:
        """The residuals of the parameters, in `residual_blocks`."""
        names = [(slot.name, at, (slot.numel,)) for slot, at in self.spans]
        return NamedViews(names, self.residual_blocks.view(-1))

    def route(self, world_size: int) -> "Route":
        """How the bucket travels among so many ranks; every call returns the same object."""
        if world_size not in self._routes:
            self._routes[world_size] = Route(self, world_size)
        return self._routes[world_size]

    def _new_blocks(self) -> torch.Tensor:
        return torch.zeros(self.blocks + 1, self.code.block_size, dtype=self.dtype, device=self.layout.device)


class Route:
    """How a bucket travels among `world_size` ranks: the shares, and the buffers of the messages.

    Attributes:
        sent: `world_size` messages, one for each rank.
        mean: the message with this rank's averaged share, for all ranks.
        plain: the uncompressed elements of the bucket, padded.
        flags: one per compressed parameter, padded.
    """

    def __init__(self, work: Workspace, world_size: int) -> None:
        device = work.layout.device
        named = [(slot.name, count) for slot, count in zip(work.slots, work.block_counts, strict=True)]
        self.shares = Shares(named, world_size, device)
        plain = _share(sum(slot.numel for slot in work.plain), world_size)
        flags = _share(len(work.slots), world_size)
        self.format = MessageFormat(
            (self.shares.size, work.dtype),
            (plain, work.wire_dtype),
            self.shares.size * work.code.block_bytes,
            flags,
        )
        self.sent = torch.zeros(world_size, self.format.size, dtype=torch.uint8, device=device)
        self.mean = torch.zeros(self.format.size, dtype=torch.uint8, device=device)
        self.plain = torch.zeros(world_size, plain, dtype=work.wire_dtype, device=device)
        self.flags = torch.zeros(world_size, flags, dtype=torch.uint8, device=device)


def slots_of(flat: torch.Tensor, slots: Sequence[Slot]) -> list[tuple[int, torch.Tensor]]:
    """The parts of a bucket's buffer that belong to `slots`, each with its offset if they lay one after another."""
    found, at = [], 0
    for slot in slots:
        found.append((at, slot.of(flat)))
        at += slot.numel
    return found


def _share(numel: int, world_size: int) -> int:
    return -(-numel // world_size)
