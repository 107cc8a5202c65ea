"""Replace the collectives of a sharded model, count what they send, and put them back."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import (
    agreement_key,
    gather_rows,
    gather_texts,
    on_all_shards,
)
from commhooks.comm.nodes import Nodes, find_nodes
from commhooks.errors import AttachError, listed
from commhooks.sharded.codec import Codec
from commhooks.sharded.gather import GatherWeights
from commhooks.sharded.layout import COMPRESSED_DTYPES
from commhooks.sharded.native import check_native
from commhooks.sharded.options import Shards
from commhooks.sharded.passes import Passes
from commhooks.sharded.routes import BetweenNodes, Direct, Route
from commhooks.sharded.scatter import ScatterGradients
from commhooks.sharded.traffic import Traffic
from commhooks.sharded.unit_codecs import UnitCodecs, code_of
from commhooks.sharded.units import Unit, units_of


class AttachedShards:
    """Holds what has taken the place of FSDP2's collectives. All ranks of `group`, which share the
    model, must make this with equal options.

    Attributes:
        codecs: of all units.
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
        self.traffic = Traffic()
        self.passes = Passes()
        self.passes.ends.append(self.traffic.end_step)
        units, _ = on_all_shards(lambda: units_of(model), [], group, device, AttachError)
        _compare(units, group, device)
        native, self.slower = check_native(device, _dtypes(units), code_of(options))
        nodes = find_nodes(options.ranks_per_node, group, device)
        self.codecs = UnitCodecs(
            options,
            units,
            device,
            ranks=group.size(),
            nodes=group.size() if nodes is None else nodes.count,
            native=native,
        )
        self._replaced: list[Callable[[], None]] = []
        route = self._route(nodes, group)
        for unit, codecs in zip(units, self.codecs.codecs, strict=True):
            self._replace(unit, *codecs, route, logs=logs)

    def _route(self, nodes: Nodes | None, group: dist.ProcessGroup) -> Route:
        if nodes is None:
            return Direct(group.size(), group.rank(), self.traffic)
        return BetweenNodes(nodes, group, self.codecs.grouped, self.traffic)

    def _replace(
        self,
        unit: Unit,
        for_weights: Codec | None,
        for_gradients: Codec | None,
        route: Route,
        *,
        logs: bool,
    ) -> None:
        codecs = self.codecs
        gather = GatherWeights(
            unit.name, codecs.ranks, for_weights, route, codecs.gathered, self.traffic
        )
        scatter = ScatterGradients(
            unit.name,
            for_gradients,
            route,
            codecs.scattered,
            self.passes,
            self.traffic,
            logs=logs,
        )
        _set(unit, gather, scatter)
        self._replaced.append(lambda: _set(unit, unit.gather, unit.scatter))

    def stats(self) -> dict[str, Any]:
        """Return the entry `shards` of `CommHook.stats`."""
        traffic = self.traffic
        counters = traffic.counters
        return {
            "kernel": "native" if self.codecs.native else "torch",
            "gathers": traffic.gathers,
            "scatters": traffic.scatters,
            "bytes_sent": counters.bytes_sent,
            "bytes_sent_last_step": counters.last_pass.bytes_sent,
            "bytes_inside_nodes": counters.bytes_inside_nodes,
            "bytes_uncompressed": counters.bytes_uncompressed,
            "memory_bytes": sum(memory.allocated for memory in self.codecs.memories),
        }

    def detach(self) -> None:
        """Put FSDP2's own collectives back, and free the buffers. Repeated calls do nothing."""
        while self._replaced:
            self._replaced.pop()()
        for memory in self.codecs.memories:
            memory.free()


def _set(unit: Unit, gather: Any, scatter: Any) -> None:
    module = unit.module()
    if module is not None:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)


def _dtypes(units: list[Unit]) -> list[torch.dtype]:
    """Return the dtypes of rows that may be compressed."""
    parameters = [parameter for unit in units for parameter in unit.parameters]
    dtypes = {p.gathered_dtype for p in parameters} | {p.reduced_dtype for p in parameters}
    return [dtype for dtype in COMPRESSED_DTYPES if dtype in dtypes]


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
