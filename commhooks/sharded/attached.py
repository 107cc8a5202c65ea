"""Replace the collectives of a sharded model, count what they send, and put them back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import (
    agreement_key,
    gather_rows,
    gather_texts,
    on_all_shards,
)
from commhooks.comm.nodes import find_nodes
from commhooks.compressors.native import library
from commhooks.compressors.quantized.kernels import results_of
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.errors import AttachError, HookConfigError, listed
from commhooks.gradients import precision
from commhooks.sharded.codec import Codec
from commhooks.sharded.gather import GatherWeights
from commhooks.sharded.layout import RowLayout, row_layout
from commhooks.sharded.memory import Memory
from commhooks.sharded.options import Shards
from commhooks.sharded.passes import Passes
from commhooks.sharded.routes import BetweenNodes, Direct, Route
from commhooks.sharded.scatter import ScatterGradients
from commhooks.sharded.traffic import Traffic
from commhooks.sharded.units import Unit, units_of

_BUFFERS = ("gathered", "scattered", "copies", "grouped")
"""Memory that all units share: messages of gathers and of scatters, which may be on their way at
the same time, copies of a row for a kernel, and rows in the order of the nodes."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The layouts of a unit; None where nothing can be compressed."""

    unit: Unit
    weights: RowLayout | None
    gradients: RowLayout | None


class AttachedShards:
    """Holds what has taken the place of FSDP2's collectives. All ranks of `group`, which share the
    model, must make this with equal options.

    Attributes:
        rows: the layouts, by unit.
        passes: notices synchronised backward passes.
        slower: why the native kernel is not used, and the remedy; "" if it is, or does not apply.

    Raises:
        AttachError: on all ranks, and nothing was replaced: a unit's collectives cannot be
            replaced on some rank, the ranks have different units, or nodes of different sizes.
    """

    def __init__(
        self,
        options: Shards,
        model: torch.nn.Module,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        logs: bool,
    ) -> None:
        self.options = options
        self.ranks = group.size()
        self.device = device
        self.traffic = Traffic()
        self.passes = Passes()
        self.passes.ends.append(self.traffic.end_step)
        units, _ = on_all_shards(lambda: units_of(model), [], group, device, AttachError)
        _compare(units, group, device)
        code = BlockCode(8, options.block_size)
        self.rows = [_rows_of(unit, options, code) for unit in units]
        self.native, self.slower = _kernel(device)
        self._memory = {name: Memory(device) for name in _BUFFERS}
        self.route = self._find_route(group)
        self._replaced: list[Callable[[], None]] = []
        for rows in self.rows:
            self._replace(rows, logs)

    def _find_route(self, group: dist.ProcessGroup) -> Route:
        nodes = find_nodes(self.options.ranks_per_node, group, self.device)
        self.arrangement = "" if nodes is None else nodes.description
        if nodes is None:
            return Direct(group.size(), group.rank(), self.traffic)
        return BetweenNodes(nodes, group, self._memory["grouped"], self.traffic)

    def _replace(self, rows: Rows, logs: bool) -> None:
        unit = rows.unit
        memory = self._memory
        weights = self._codec(rows.weights)
        gradients = self._codec(rows.gradients)
        if gradients is not None and self.arrangement:
            assert rows.gradients is not None
            size = rows.gradients.numel * rows.gradients.dtype.itemsize
            memory["grouped"].reserve(self.ranks * size)
        gather = GatherWeights(
            unit.name, self.ranks, weights, self.route, memory["gathered"], self.traffic
        )
        scatter = ScatterGradients(
            unit.name,
            gradients,
            self.route,
            memory["scattered"],
            self.passes,
            self.traffic,
            logs=logs,
        )
        _set(unit, gather, scatter)
        self._replaced.append(lambda: _set(unit, unit.gather, unit.scatter))

    def _codec(self, layout: RowLayout | None) -> Codec | None:
        if layout is None or not layout.compressed:
            return None
        return Codec(layout, self._memory["copies"], rows=self.ranks, native=self.native)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes of one buffer each: see `_BUFFERS`. There are as many as FSDP2 uses at a time: more
        than one if it gathers ahead of the unit that it computes next.
        """
        return {name: memory.size for name, memory in self._memory.items()}

    def stats(self) -> dict[str, Any]:
        """Return the entry `shards` of `CommHook.stats`."""
        traffic = self.traffic
        counters = traffic.counters
        return {
            "kernel": "native" if self.native else "torch",
            "gathers": traffic.gathers,
            "scatters": traffic.scatters,
            "bytes_sent": counters.bytes_sent,
            "bytes_sent_last_step": counters.last_pass.bytes_sent,
            "bytes_inside_nodes": counters.bytes_inside_nodes,
            "bytes_uncompressed": counters.bytes_uncompressed,
            "memory_bytes": sum(memory.allocated for memory in self._memory.values()),
        }

    def detach(self) -> None:
        """Put FSDP2's own collectives back, and free the buffers. Repeated calls do nothing."""
        while self._replaced:
            self._replaced.pop()()
        self._memory.clear()


def _set(unit: Unit, gather: Any, scatter: Any) -> None:
    module = unit.module()
    if module is not None:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)


def _rows_of(unit: Unit, options: Shards, code: BlockCode) -> Rows:
    def layout(parameters: list[Any], dtypes: list[torch.dtype], form: str | None) -> Any:
        return row_layout(parameters, dtypes, form, code, options.exclude)

    gathered = [parameter.gathered_dtype for parameter in unit.parameters]
    reduced = [parameter.reduced_dtype for parameter in unit.trained]
    return Rows(
        unit,
        layout(list(unit.parameters), gathered, options.weights),
        layout(unit.trained, reduced, options.gradients),
    )


def _kernel(device: torch.device) -> tuple[bool, str]:
    if not precision.is_host_readable(device):
        return False, ""
    try:
        return library.build(device, results_of) != "", ""
    except HookConfigError as error:
        return False, str(error)


def _compare(units: list[Unit], group: dist.ProcessGroup, device: torch.device) -> None:
    what = "the units of each rank"
    text = "\n".join(unit.described() for unit in units)
    key = torch.tensor([agreement_key(text)], device=device)
    keys = gather_rows(key, group, None, what).flatten().tolist()
    if len(set(keys)) == 1:
        return
    texts = gather_texts(text, group, device, what)
    different = [rank for rank, other in enumerate(texts) if other != texts[0]]
    raise AttachError(
        f"ranks {listed(different)} of the sharding group have other units than rank 0: apply"
        " fully_shard to the same modules, with the same frozen parameters, on all ranks"
    )
