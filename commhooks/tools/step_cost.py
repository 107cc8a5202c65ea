"""Predict what a training step costs on a network: pure functions of a `Cluster`.

docs/commands.md describes the model; docs/performance.md compares it with measurements.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.features import Shards
from commhooks.plan import whole_plan
from commhooks.registry import COMPRESSORS
from commhooks.request import HookRequest

Kind = Literal["sum", "max", "gather", "all_to_all", "ring_gather", "ring_scatter"]
"""Of a collective: those of `Send`, and FSDP2's own all-gather and reduce-scatter."""
Backend = Literal["nccl", "gloo"]
_BUCKET_BYTES = 25 * 2**20  # DDP's default


# ---- what is predicted ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Names a hook with options as in `attach`.

    Attributes:
        label: its name in the table.
        passes: how often its codec reads or writes the gradients, counted in passes over as many
            numbers at the speed of `a.add_(b)`; see `Cluster.memory`. Estimated.
    """

    label: str
    hook: str
    options: dict[str, Any]
    passes: float = 0.0


PLAIN = Predicted("plain DDP", "allreduce", {})
CANDIDATES = (
    PLAIN,
    Predicted("bf16", "bf16_compress", {}, 5),
    Predicted("int8", "int8_compress", {}, 10),
    Predicted("int4", "int4_compress", {}, 10),
    Predicted("powerSGD rank 4", "powerSGD", {"matrix_approximation_rank": 4}, 11),
    Predicted("diloco, every 5 steps", "diloco", {"sync_every": 5}, 20),
    Predicted("diloco, every 30 steps", "diloco", {"sync_every": 30}, 20),
)
"""In order of increasing loss."""


@dataclass(frozen=True)
class Sharding:
    """Names what FSDP2 sends over all ranks. `passes`: as in `Predicted`, for a step with two
    gathers; a gather is about a third of it.
    """

    label: str
    bytes_per_number: float
    passes: float = 0.0


FSDP2 = Sharding("fully_shard", 4)
SHARDINGS = (
    FSDP2,
    Sharding('shards="bf16"', 2, 10),
    # a scale of 4 bytes per block of 128
    Sharding('shards="int8"', 1 + 4 / 128, 10),
)


@dataclass(frozen=True)
class Exchange:
    """Holds the predicted time that a step spends on the network and in the codec, on average.

    Attributes:
        seconds: of both.
        codec_s: in the codec.
        bytes_leaving: bytes that a machine sends to others in a step.
        between_nodes: whether this is with `ranks_per_node`, because it is faster.
    """

    candidate: Predicted | Sharding
    seconds: float
    between_nodes: bool
    codec_s: float = 0.0
    bytes_leaving: float = 0.0


# ---- the network ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collectives:
    """Describes the collectives of a step.

    Attributes:
        counted: bytes of all of them (see `Counters`), divided equally among `kinds`.
        kinds: one after another in each bucket.
        buckets: or units of FSDP2.
    """

    counted: float
    kinds: Sequence[Kind]
    buckets: float


@dataclass(frozen=True)
class Cluster:
    """Holds the parameters of the network model.

    Attributes:
        bandwidth: bit/s per machine, between machines.
        inside: bit/s per rank, inside a machine.
        latency: seconds per message, between machines.
        memory: bytes per second that a rank reads and writes in `a.add_(b)`.
    """

    machines: int
    ranks_per_machine: int
    bandwidth: float
    inside: float
    latency: float
    backend: Backend
    memory: float = field(default=math.inf, kw_only=True)

    @property
    def ranks(self) -> int:
        return self.machines * self.ranks_per_machine

    def leaving(self, collectives: Collectives, together: int) -> float:
        """Return the bytes that leave a machine. `together`: number of ranks of a machine in one
        group.
        """
        each = collectives.counted / len(collectives.kinds)
        return sum(self._leaving(kind, each, together) for kind in collectives.kinds)

    def seconds(self, collectives: Collectives, together: int) -> float:
        """Predict the seconds of the collectives."""
        messages = sum(self._messages(kind, together) for kind in collectives.kinds)
        wire_s = 8 * self.leaving(collectives, together) / self.bandwidth
        return wire_s + collectives.buckets * messages * self.latency

    def codec_s(self, passes: float, numel: float) -> float:
        return 4 * passes * numel / self.memory

    def _leaving(self, kind: Kind, counted: float, together: int) -> float:
        ranks = self.machines * together
        if self._in_pairs(kind):  # each rank sends to every other rank
            return 2 * together * (ranks - together) / ranks * counted
        ring = 2 * (ranks - 1) / ranks * counted
        # gloo's reduce-scatter is an all-reduce of everything (torch 2.13)
        return 2 * ring if kind == "ring_scatter" and self.backend == "gloo" else ring

    def _messages(self, kind: Kind, together: int) -> int:
        ranks = self.machines * together
        return ranks - together if self._in_pairs(kind) else messages(kind, ranks, self.backend)

    def _in_pairs(self, kind: Kind) -> bool:
        return kind == "all_to_all" or (kind == "gather" and self.backend == "gloo")


def messages(kind: Kind, ranks: int, backend: Backend) -> int:
    """Return the number of consecutive messages in a ring, or in NCCL's tree if there are fewer."""
    if kind in ("gather", "ring_gather") or (kind == "ring_scatter" and backend == "nccl"):
        return ranks - 1
    return 2 * min(ranks - 1, math.ceil(math.log2(ranks)) if backend == "nccl" else ranks)


# ---- a step --------------------------------------------------------------------------------------


def exchanges(numel: float, cluster: Cluster) -> list[Exchange]:
    """Predict a step of each hook for a model that every rank has as a whole."""
    parameters = [ParameterInfo(name, weight) for name, weight in transformer(numel).items()]
    candidates = [candidate for candidate in CANDIDATES if candidate.hook in COMPRESSORS]
    return [exchange(candidate, parameters, cluster) for candidate in candidates]


def exchange(
    candidate: Predicted, parameters: Sequence[ParameterInfo], cluster: Cluster
) -> Exchange:
    """Predict a step with this hook, with `ranks_per_node` if it is faster."""
    return min(arrangements(candidate, parameters, cluster), key=total_s)


def arrangements(
    candidate: Predicted, parameters: Sequence[ParameterInfo], cluster: Cluster
) -> list[Exchange]:
    """Predict a step among all ranks, and where the hook allows it between nodes."""
    request = HookRequest.parse(candidate.hook, hook_options=candidate.options)
    compressor = request.new_compressor(total_steps=1)
    assert compressor is not None
    plan = whole_plan(candidate.hook, compressor, compressor.plan(parameters))
    config = compressor.config
    every = config.sync_every if config.averages_weights else 1
    sent = Collectives(
        every * (plan.bytes_after + plan.flag_bytes),
        compressor.collectives,
        math.ceil(plan.bytes_before / _BUCKET_BYTES),
    )
    codec_s = cluster.codec_s(candidate.passes, plan.bytes_before / 4)

    def predicted(together: int, inside_s: float = 0.0) -> Exchange:
        computing_s = codec_s * together / cluster.ranks_per_machine
        seconds = (cluster.seconds(sent, together) + computing_s) / every + inside_s
        leaving = cluster.leaving(sent, together) / every
        return Exchange(
            candidate, seconds, together < cluster.ranks_per_machine, computing_s / every, leaving
        )

    ranks = cluster.ranks_per_machine
    among_all = predicted(ranks)
    if candidate is PLAIN or config.averages_weights or ranks == 1:
        return [among_all]
    # Inside a machine every gradient travels twice, as in an all-reduce.
    inside = 8 * 2 * (ranks - 1) / ranks * plan.bytes_before / cluster.inside
    return [among_all, predicted(1, inside)]


def sharded_exchanges(numel: float, cluster: Cluster, gathers: float = 2) -> list[Exchange]:
    """Predict a step of a model that `fully_shard` has divided among all ranks, a unit per layer.

    `gathers`: how often a step gathers the weights; 2 with `reshard_after_forward=True`, else 1.
    """
    shapes = transformer(numel).items()
    total = sum(weight.numel() for _, weight in shapes)
    units = len({name.partition(".")[0] for name, _ in shapes})
    return [
        sharded_exchange(sharding, total, units, gathers, cluster)
        for sharding in (SHARDINGS if Shards is not type(None) else ())
    ]


def sharded_exchange(
    sharding: Sharding, numel: float, units: int, gathers: float, cluster: Cluster
) -> Exchange:
    """Predict a step in which `units` of together `numel` parameters are gathered `gathers` times
    each and scattered once.
    """
    whole = sharding.bytes_per_number * numel
    ranks = cluster.ranks_per_machine
    compresses = sharding is not FSDP2
    together = 1 if compresses else ranks
    gather: Kind = "gather" if compresses else "ring_gather"
    scatter: Kind = "all_to_all" if compresses else "ring_scatter"
    sent = [
        Collectives(gathers * whole / 2, [gather], gathers * units),
        Collectives(whole / 2, [scatter], units),
    ]
    network_s = sum(cluster.seconds(collectives, together) for collectives in sent)
    if compresses:  # inside a machine: messages of the gathers, and exact gradients
        inside = (ranks - 1) / ranks * (gathers * whole + 4 * numel)
        network_s += 8 * inside / cluster.inside
    codec_s = cluster.codec_s((gathers + 1) / 3 * sharding.passes, numel)
    leaving = sum(cluster.leaving(collectives, together) for collectives in sent)
    between_nodes = compresses and ranks > 1
    return Exchange(sharding, network_s + codec_s, between_nodes, codec_s, leaving)


def total_s(predicted: Exchange) -> float:
    return predicted.seconds


def transformer(numel: float) -> dict[str, torch.Tensor]:
    """Make a transformer of about `numel` parameters, 64 times as wide as deep, like GPT-2.

    The tensors are on the meta device.
    """
    width = max(64, 64 * round((64 * numel / 12) ** (1 / 3) / 64))
    layers = max(1, round(numel / (12 * width**2)))
    shapes = {"attention": (3 * width, width), "output": (width, width), "norm": (width,)}
    shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    with torch.device("meta"):
        return {
            f"{layer}.{name}": torch.empty(shape)
            for layer in range(layers)
            for name, shape in shapes.items()
        }
