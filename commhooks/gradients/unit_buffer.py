"""The buffers that `fully_shard` reduces in one backward pass, and which shard is where in them."""

from dataclasses import dataclass, field

import torch

from commhooks.gradients.local_shard import LocalShard
from commhooks.gradients.source import Future


@dataclass(eq=False)
class UnitBuffer:
    """A reduced buffer on its way: filled parameter by parameter, then sent.

    Attributes:
        flat: as FSDP passed it.
        sent: the bucket's buffer: `flat`, or a copy of it without the padding.
        average: of `sent`.
    """

    flat: torch.Tensor
    shards: list[LocalShard] = field(default_factory=list)
    numel: int = 0
    sent: torch.Tensor = field(init=False)
    average: Future = field(init=False)

    def add(self, shard: LocalShard) -> None:
        self.shards.append(shard)
        self.numel += shard.numel_padded

    @property
    def complete(self) -> bool:
        return self.numel == self.flat.numel()

    def without_padding(self) -> torch.Tensor:
        if self.numel == sum(shard.local.numel() for shard in self.shards):
            return self.flat
        return torch.cat([piece for _, piece in self.pieces(self.flat, padded=True)])

    def pieces(self, buffer: torch.Tensor, *, padded: bool) -> list[tuple[LocalShard, torch.Tensor]]:
        """The part of `buffer` that belongs to each shard, 1-D."""
        found, offset = [], 0
        for shard in self.shards:
            found.append((shard, buffer[offset : offset + shard.local.numel()]))
            offset += shard.numel_padded if padded else shard.local.numel()
        return found


@dataclass(eq=False)
class RunningPass:
    """A running backward pass.

    Attributes:
        task: see `current_task`.
        units: those that have been sent.
        filling: the one whose parameters FSDP is naming.
        earlier: gradients that earlier backward passes have accumulated, taken out of `.grad`.
    """

    task: int
    units: list[UnitBuffer] = field(default_factory=list)
    filling: UnitBuffer | None = None
    earlier: list[tuple[LocalShard, torch.Tensor]] = field(default_factory=list)

    def has(self, shard: LocalShard) -> bool:
        return any(shard in unit.shards for unit in self.units)
