"""Predict what a step of a model spends on the network that was measured, with plain DDP and with hooks.

The model of the network is that of docs/planning.md: a message costs its latency, a byte the inverse of the bandwidth,
and the ranks of a machine share its network card.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from commhooks.comm.collectives import Op
from commhooks.compressors.candidates import ALLREDUCE, BF16, INT8, Candidate, powersgd
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.errors import HookConfigError
from commhooks.local_steps.options import LocalSteps, passes_per_exchange
from commhooks.plan import whole_plan
from commhooks.request import HookRequest
from commhooks.tools.network.link import Link

PLAIN = dataclasses.replace(ALLREDUCE, label="plain DDP")
CANDIDATES = (
    *(PLAIN, BF16, INT8, powersgd(4, {})),
    *(Candidate(f"diloco, every {every} steps", "diloco", {"sync_every": every}) for every in (5, 30)),
)
"""The least lossy first."""
_BUCKET_BYTES = 25 * 2**20
"""DDP's default."""
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True)
class Cluster:
    """
    Attributes:
        bandwidth: between machines, bit/s of a machine.
        inside: inside a machine, bit/s of a rank.
        latency: seconds per message between machines.
        backend: what carries the collectives.
    """

    machines: int
    ranks_per_machine: int
    bandwidth: float
    inside: float
    latency: float
    backend: Literal["nccl", "gloo"]

    def seconds(self, counted: float, ops: Sequence[Op], buckets: int, together: int) -> float:
        """Seconds of the collectives `ops` of each bucket, one after another.

        Args:
            counted: bytes in all buckets, see `Counters`; divided equally among `ops`.
            together: how many ranks of a machine are in one group.
        """
        ranks, found = self.machines * together, 0.0
        for op in ops:
            if op == "all_to_all" or (op == "gather" and self.backend == "gloo"):  # each rank sends to each other one
                shares, messages = together * (ranks - together), ranks - together
            else:
                shares, messages = ranks - 1, _messages(op, ranks, self.backend)
            leaving = 2 * shares / ranks * counted / len(ops)
            found += 8 * leaving / self.bandwidth + buckets * messages * self.latency
        return found


def _messages(op: Op, ranks: int, backend: str) -> int:
    """How many messages of a ring follow one another; NCCL sums in a tree where that takes fewer."""
    if op == "gather":
        return ranks - 1
    return 2 * min(ranks - 1, math.ceil(math.log2(ranks)) if backend == "nccl" else ranks)


def cluster_of(
    machines: Sequence[Sequence[int]], link: Link, inside_mbit_per_s: float, backend: Literal["nccl", "gloo"]
) -> Cluster:
    """The network that was measured. Where the ranks cannot be divided into equal machines, each one counts as a
    machine. `machines`: the ranks of each."""
    ranks, sizes = sum(map(len, machines)), {len(each) for each in machines}
    together = sizes.pop() if len(machines) > 1 and len(sizes) == 1 else 1
    latency = link.latency_ms / 1e3 / _messages("sum", ranks, backend)
    return Cluster(ranks // together, together, 1e6 * link.mbit_per_s, 1e6 * inside_mbit_per_s, latency, backend)


@dataclass(frozen=True)
class Exchange:
    """What a step of a model spends on the network with one hook.

    Attributes:
        candidate: the hook.
        seconds: per step, on average.
        between_nodes: with `ranks_per_node`, which is faster.
    """

    candidate: Candidate
    seconds: float
    between_nodes: bool


def exchanges(numel: float, cluster: Cluster) -> list[Exchange]:
    """For a transformer of so many parameters, of each of `CANDIDATES`."""
    return [_exchange(candidate, transformer(numel), cluster) for candidate in CANDIDATES]


def _exchange(candidate: Candidate, parameters: dict[str, torch.Tensor], cluster: Cluster) -> Exchange:
    request = HookRequest.parse(candidate.hook, hook_options=candidate.options)
    compressor = request.new_compressor(total_steps=1)
    assert compressor is not None
    plan = whole_plan(
        candidate.hook, compressor, compressor.plan([ParameterInfo(*each) for each in parameters.items()])
    )
    every, buckets = passes_per_exchange(compressor.config), math.ceil(plan.bytes_before / _BUCKET_BYTES)
    counted = every * (plan.bytes_after + plan.flag_bytes)

    def seconds(together: int) -> float:
        return cluster.seconds(counted, compressor.collectives, buckets, together) / every

    among_all = Exchange(candidate, seconds(cluster.ranks_per_machine), between_nodes=False)
    if candidate is PLAIN or isinstance(compressor.config, LocalSteps) or cluster.ranks_per_machine == 1:
        return among_all
    ranks = cluster.ranks_per_machine  # inside a machine every gradient travels twice, as in an all-reduce
    inside = 8 * 2 * (ranks - 1) / ranks * plan.bytes_before / cluster.inside
    return min(among_all, Exchange(candidate, seconds(1) + inside, between_nodes=True), key=lambda each: each.seconds)


def parsed_size(text: str) -> float:
    """The number of parameters that "124M" means.

    Raises:
        HookConfigError: it is no number.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmb]?)", text.strip().lower())
    size = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if size < 1:
        raise HookConfigError(f"--params {text}: expected a number of parameters such as 350k, 124M or 1.5B")
    return size


def transformer(numel: float) -> dict[str, torch.Tensor]:
    """The parameters of a transformer of about this size, without memory: as GPT-2, 64 times as wide as deep."""
    width = max(64, 64 * round((64 * numel / 12) ** (1 / 3) / 64))
    layers = max(1, round(numel / (12 * width**2)))
    shapes = {"attention": (3 * width, width), "output": (width, width), "norm": (width,)}
    shapes |= {"up": (4 * width, width), "down": (width, 4 * width)}
    with torch.device("meta"):
        return {f"{layer}.{name}": torch.empty(shape) for layer in range(layers) for name, shape in shapes.items()}
