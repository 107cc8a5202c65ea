"""The layouts and codecs of a model's units, and the memory that they share. Made without a process
group, so that a run can be planned on one machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commhooks.comm.nodes import described as nodes_described
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.sharded.codec import Codec
from commhooks.sharded.layout import RowLayout, UnitParameter, row_layout
from commhooks.sharded.memory import Memory
from commhooks.sharded.options import Shards
from commhooks.sharded.units import UnitLayout


@dataclass(frozen=True, eq=False)
class Rows:
    """The layouts of a unit's rows; None where nothing can be compressed."""

    unit: UnitLayout
    weights: RowLayout | None
    gradients: RowLayout | None


class UnitCodecs:
    """Makes the codecs of all units and reserves their memory; nothing is allocated.

    Args:
        ranks: number of ranks that share the model.
        nodes: the nodes that they form; without nodes, as many as ranks.
        native: compute with the native kernel of the device.

    Attributes:
        rows: the layouts, by unit.
        codecs: for weights and gradients, by unit; None where FSDP2 sends them as they are.
        gathered, scattered: messages of gathers and of scatters, which may be on their way at the
            same time.
        copies: copies of a row for a kernel.
        grouped: rows in the order of the nodes.
    """

    def __init__(
        self,
        options: Shards,
        units: Sequence[UnitLayout],
        device: torch.device,
        *,
        ranks: int,
        nodes: int,
        native: bool,
    ) -> None:
        self.options = options
        self.ranks = ranks
        self.nodes = nodes
        self.native = native
        self.gathered = Memory(device)
        self.scattered = Memory(device)
        self.copies = Memory(device)
        self.grouped = Memory(device)
        self.rows = [_rows_of(unit, options) for unit in units]
        self.codecs = [
            (self._for_weights(rows.weights), self._for_gradients(rows.gradients))
            for rows in self.rows
        ]

    @property
    def arrangement(self) -> str:
        """The nodes in words; "" without nodes."""
        if self.nodes == self.ranks:
            return ""
        return nodes_described(self.nodes, self.ranks // self.nodes)

    @property
    def memories(self) -> tuple[Memory, ...]:
        return self.gathered, self.scattered, self.copies, self.grouped

    def _for_weights(self, layout: RowLayout | None) -> Codec | None:
        codec = self._codec(layout)
        if codec is not None:
            self.gathered.reserve(self.ranks * codec.message_bytes)
        return codec

    def _for_gradients(self, layout: RowLayout | None) -> Codec | None:
        codec = self._codec(layout)
        if codec is not None:
            self.scattered.reserve(2 * self.nodes * codec.message_bytes)
            if self.nodes < self.ranks:
                row_bytes = codec.layout.numel * codec.layout.dtype.itemsize
                self.grouped.reserve(self.ranks * row_bytes)
        return codec

    def _codec(self, layout: RowLayout | None) -> Codec | None:
        if layout is None or not layout.compressed:
            return None
        return Codec(layout, self.copies, rows=self.ranks, native=self.native)


def code_of(options: Shards) -> BlockCode:
    return BlockCode(8, options.block_size)


def _rows_of(unit: UnitLayout, options: Shards) -> Rows:
    code = code_of(options)

    def layout(
        parameters: Sequence[UnitParameter], dtypes: list[torch.dtype], form: str | None
    ) -> RowLayout | None:
        return row_layout(parameters, dtypes, form, code, options.exclude)

    gathered = [parameter.gathered_dtype for parameter in unit.parameters]
    reduced = [parameter.reduced_dtype for parameter in unit.trained]
    return Rows(
        unit,
        layout(unit.parameters, gathered, options.weights),
        layout(unit.trained, reduced, options.gradients),
    )
