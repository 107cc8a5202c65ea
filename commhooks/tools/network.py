"""`commhooks network`: measure the network, and predict the time that a step spends on it.

docs/commands.md describes the model of the prediction.
"""

import argparse
import contextlib
import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import (
    collective_error,
    gather_rows,
    gather_texts,
    resolve_group,
)
from commhooks.comm.groups import backend_of
from commhooks.comm.nodes import places_of, ranks_by_place
from commhooks.errors import CommandError, HookConfigError
from commhooks.plan import new_table, text_of
from commhooks.tools.common import process_group, seconds_of
from commhooks.tools.step_cost import (
    Backend,
    Cluster,
    Exchange,
    Predicted,
    exchanges,
    messages,
    sharded_exchanges,
    total_s,
)

SMALL = 0.15
"""An exchange is small if it takes at most this share of a step's computing time. A lossier hook
could then make the step at most 13 % shorter.
"""
SLOW = 0.5
"""A connection is slow below this share of the median rate."""
UNUSED = 0.25
"""An interface is slow below this share of its rated speed."""
MOST = 66
"""The maximum number of pairs to measure: all pairs of 12 ranks. A pair takes 0.25 s on a fast
network.
"""
COUNTED_BYTES = 100_000
"""An interface that has sent fewer bytes was not used by the measurement."""
SYSTEM = Path("/sys/class/net")  # Linux only
CONNECTIONS_LEGEND = (
    "Two ranks: one large message in one direction while no other rank sends, and half the round"
    " trip of a small one. All at once: what every rank sends, and receives at the same time, in an"
    " all-reduce of a large buffer, and the time of an all-reduce of one number."
)
ONE_MACHINE = (
    "All ranks are on one machine, so this is the speed of its memory and processors, not of a"
    " network."
)
LEGEND = (
    "Predicted from the line 'all at once' and the speed of memory, as if nothing overlapped with"
    " the backward pass; * with ranks_per_node. fully_shard is over all ranks and gathers weights"
    " twice per step, or as often as --gathers says."
)
_LARGEST_BYTES = 32 * 2**20
_SMALLEST_BYTES = 64 * 2**10
_ADDED_BYTES = 64 * 2**20
_ENOUGH_S = 0.05
_REPEATS = 3
_PINGS = 5


def run(arguments: argparse.Namespace) -> None:
    sizes = {text: parsed_size(text) for text in arguments.params}
    if arguments.step_ms is not None and not 0 < arguments.step_ms < math.inf:
        raise HookConfigError(f"--step-ms {arguments.step_ms}: expected a number above 0")
    with process_group(
        arguments.backend, "torchrun --nnodes 2 --nproc-per-node 8 ... -m commhooks network"
    ):
        group = resolve_group()
        report = measure(group, sizes, arguments.step_ms, arguments.gathers)
        if group.rank() == 0:
            print(json.dumps(report.as_dict(), indent=1) if arguments.json else report, flush=True)
        dist.barrier()


def measure(
    group: dist.ProcessGroup, sizes: dict[str, float], step_ms: float | None, gathers: int = 2
) -> "NetworkReport":
    """Measure the network between the ranks of `group`; all of them must call this.

    Returns the same report on all ranks. `sizes`: numbers of parameters, by the names that the
    report shows. `step_ms`: the time of a step without a network, if known. `gathers`: see
    `sharded_exchanges`.
    """
    if group.size() == 1:
        raise CommandError(
            "there is one rank, and no network to measure: start as many ranks as the run will have"
        )
    began = time.perf_counter()
    cuda = torch.device("cuda")
    on_gpu = torch.cuda.is_available() and backend_of(group, cuda).startswith("nccl")
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    machines = _machines(group, device)
    before = sent_bytes()
    link = measure_link(group, device)
    pairs = measure_pairs(pairs_to_measure(list(machines.values())), group, device)
    used = busiest(before, others=len(machines) > 1)
    texts = gather_texts(
        json.dumps([used.name, used.rated_mbit_per_s]), group, device, "the names of the interfaces"
    )
    inside = [
        p.mbit_per_s for p in pairs if any({*p.ranks} <= {*ranks} for ranks in machines.values())
    ]
    cluster = cluster_of(
        list(machines.values()),
        link,
        max(inside, default=link.mbit_per_s),
        "nccl" if on_gpu else "gloo",
        memory_speed(group, device),
    )
    return NetworkReport(
        machines=machines,
        interfaces={
            name: Interface(*json.loads(texts[ranks[0]])) for name, ranks in machines.items()
        },
        backend=backend_of(group, device),
        pairs=pairs,
        link=link,
        exchanges={text: exchanges(size, cluster) for text, size in sizes.items()},
        sharded={text: sharded_exchanges(size, cluster, gathers) for text, size in sizes.items()},
        step_ms=step_ms,
        took_s=time.perf_counter() - began,
    )


def _machines(group: dist.ProcessGroup, device: torch.device) -> dict[str, list[int]]:
    """Return the ranks of each machine, by its host, or by host and launcher if two of them run on
    one host.
    """
    machines = ranks_by_place(places_of(group, device))
    hosts = [place.partition(" ")[0] for place in machines]
    if len({*hosts}) == len(hosts):
        return dict(zip(hosts, machines.values(), strict=True))
    return machines


# ---- all ranks together
# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Describes the network as measured on the slowest rank.

    Its rate is that at which the rank sends, and receives, in a ring all-reduce of one large
    buffer, and its latency the time of an all-reduce of one number.
    """

    mbit_per_s: float
    latency_ms: float


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    def all_reduce_s(buffer: torch.Tensor) -> float:
        row = torch.tensor([_all_reduce_s(buffer, group)], dtype=torch.float64, device=device)
        return float(gather_rows(row, group, None, "the time of an all-reduce").max())

    latency_s = statistics.median(
        all_reduce_s(torch.ones(1, device=device)) for _ in range(2 + _REPEATS)
    )
    buffer = torch.ones(_SMALLEST_BYTES // 4, device=device)
    took_s = all_reduce_s(buffer)
    while took_s < _enough_s(latency_s) and buffer.nbytes < _LARGEST_BYTES:
        buffer = torch.ones(2 * buffer.numel(), device=device)
        took_s = all_reduce_s(buffer)
    # The first all-reduce of a size uses fresh memory. The fastest one was disturbed least.
    took_s = min(took_s, *(all_reduce_s(buffer) for _ in range(_REPEATS)))
    sent = 2 * (group.size() - 1) / group.size() * buffer.nbytes
    return Link(8e-6 * sent / _without_latency_s(took_s, latency_s), 1000 * latency_s)


def _all_reduce_s(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    return seconds_of(lambda: dist.all_reduce(buffer, group=group), buffer.device)


def _enough_s(latency_s: float) -> float:
    return max(_ENOUGH_S, 8 * latency_s)


def _without_latency_s(took_s: float, latency_s: float) -> float:
    """Return the time for the bytes of a message: at least a tenth of its time."""
    return max(took_s - latency_s, took_s / 10)


def memory_speed(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bytes per second of `a.add_(b)` on the slowest rank, all ranks at a time."""
    a, b = torch.ones(2, _ADDED_BYTES // 4, device=device)
    took_s = min(seconds_of(lambda: a.add_(b), device) for _ in range(1 + _REPEATS))
    row = torch.tensor([took_s], dtype=torch.float64, device=device)
    slowest_s = float(gather_rows(row, group, None, "the time of an addition").max())
    return 3 * a.nbytes / slowest_s


# ---- pairs
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Describes the connection between two ranks.

    Its rate is that of one large message from the first to the second, and its latency half the
    round-trip time of one number.
    """

    ranks: tuple[int, int]
    mbit_per_s: float
    latency_ms: float


def pairs_to_measure(machines: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return all pairs of ranks, or fewer if there are more than `MOST`.

    Then there is one pair per two machines, and one inside a machine; if that is still too many,
    each machine is paired with the next only. `machines`: the ranks of each.
    """
    every = list(itertools.combinations(sorted(itertools.chain(*machines)), 2))
    if len(every) <= MOST:
        return every
    firsts = [ranks[0] for ranks in machines]
    between = list(itertools.combinations(firsts, 2))
    if len(between) > MOST:
        between = [*itertools.pairwise(firsts)]
    return between + [(ranks[0], ranks[1]) for ranks in machines[:1] if len(ranks) > 1]


def measure_pairs(
    pairs: Sequence[tuple[int, int]], group: dist.ProcessGroup, device: torch.device
) -> list[Pair]:
    measured = []
    for first, second in pairs:
        row = torch.zeros(2, dtype=torch.float64, device=device)
        try:
            if group.rank() == first:
                row.copy_(torch.tensor(_ask(second, group, device)))
            elif group.rank() == second:
                _answer(first, group, device)
            # the other ranks wait here, so only one pair runs
            dist.broadcast(row, group=group, group_src=first)
        except RuntimeError as error:
            messages = f"messages between rank {first} and rank {second}"
            raise collective_error(messages, group, error) from error
        rate, latency = row.tolist()
        measured.append(Pair((first, second), rate, latency))
    return measured


def _ask(peer: int, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Return the rate in Mbit/s and the latency in ms to the rank `peer`, which runs `_answer`."""

    def there_and_back(size: int) -> None:
        _send(torch.tensor([size]), peer, group, device)
        _send(torch.zeros(size // 4), peer, group, device)
        _receive(torch.zeros(1), peer, group, device)

    def there_and_back_s(size: int) -> float:
        return seconds_of(lambda: there_and_back(size), device)

    round_trip_s = statistics.median([there_and_back_s(4) for _ in range(1 + _PINGS)][1:])
    size = _SMALLEST_BYTES
    took_s = there_and_back_s(size)
    while took_s < _enough_s(round_trip_s) and size < _LARGEST_BYTES:
        size *= 2
        took_s = there_and_back_s(size)
    took_s = min(took_s, there_and_back_s(size))
    _send(torch.tensor([0]), peer, group, device)  # the end
    return 8e-6 * size / _without_latency_s(took_s, round_trip_s), 500 * round_trip_s


def _answer(peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
    while size := int(_receive(torch.zeros(1, dtype=torch.int64), peer, group, device)):
        _receive(torch.zeros(size // 4), peer, group, device)
        _send(torch.zeros(1), peer, group, device)


def _send(tensor: torch.Tensor, to: int, group: dist.ProcessGroup, device: torch.device) -> None:
    dist.send(tensor.to(device), group=group, group_dst=to)


def _receive(
    tensor: torch.Tensor, source: int, group: dist.ProcessGroup, device: torch.device
) -> torch.Tensor:
    tensor = tensor.to(device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor


# ---- interfaces
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interface:
    """Describes a network interface of a machine.

    The name is "" if unknown, as with InfiniBand, whose bytes Linux does not count.
    """

    name: str = ""
    rated_mbit_per_s: float | None = None

    @property
    def words(self) -> str:
        if not self.name:
            return "interface unknown"
        if not self.rated_mbit_per_s:
            return self.name
        return f"{self.name}, rated at {bandwidth(self.rated_mbit_per_s)}"


def sent_bytes(system: Path = SYSTEM) -> dict[str, int]:
    sent = {}
    for counter in system.glob("*/statistics/tx_bytes"):
        with contextlib.suppress(OSError, ValueError):
            sent[counter.parts[-3]] = int(counter.read_text())
    return sent


def busiest(before: dict[str, int], others: bool, system: Path = SYSTEM) -> Interface:
    grown = {name: sent - before.get(name, sent) for name, sent in sent_bytes(system).items()}
    if others:
        grown.pop("lo", None)
    name = max(grown, key=lambda interface: grown[interface], default="")
    if not name or grown[name] < COUNTED_BYTES:
        return Interface()
    rated = None
    with contextlib.suppress(OSError, ValueError):  # virtual interfaces raise, or have -1
        rated = float((system / name / "speed").read_text())
    return Interface(name, rated if rated is not None and rated > 0 else None)


def bandwidth(mbit_per_s: float) -> str:
    rounded = float(f"{mbit_per_s:.2g}")
    return f"{rounded / 1000:g} Gbit/s" if rounded >= 1000 else f"{rounded:g} Mbit/s"


# ---- predictions
# --------------------------------------------------------------------------------------------------


def cluster_of(
    machines: Sequence[Sequence[int]],
    link: Link,
    inside_mbit_per_s: float,
    backend: Backend,
    memory: float = math.inf,
) -> Cluster:
    """Fit the model; see `Cluster`. If machines have different numbers of ranks, each rank counts
    as a machine.
    """
    ranks = sum(map(len, machines))
    sizes = {len(ranks_of_machine) for ranks_of_machine in machines}
    together = sizes.pop() if len(machines) > 1 and len(sizes) == 1 else 1
    latency = link.latency_ms / 1e3 / messages("sum", ranks, backend)
    return Cluster(
        ranks // together,
        together,
        1e6 * link.mbit_per_s,
        1e6 * inside_mbit_per_s,
        latency,
        backend,
        memory=memory,
    )


def parsed_size(text: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmb]?)", text.strip().lower())
    size = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]] if match else 0.0
    if size < 1:
        raise HookConfigError(
            f"--params {text}: expected a number of parameters such as 350k, 124M or 1.5B"
        )
    return size


# ---- the report
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkReport:
    """Holds the result of `commhooks network`, equal on every rank. `print(report)` shows tables
    and advice. `machines` and `interfaces` are by machine; `exchanges` by model size, one per hook,
    and `sharded` likewise, for a model that `fully_shard` has divided among all ranks.
    """

    machines: dict[str, list[int]]
    interfaces: dict[str, Interface]
    backend: str
    pairs: list[Pair]
    link: Link
    exchanges: dict[str, list[Exchange]]
    sharded: dict[str, list[Exchange]]
    step_ms: float | None
    took_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"advice": self.advice()}

    def __str__(self) -> str:
        ranks = sum(map(len, self.machines.values()))
        lines = [f"{ranks} ranks, {self.backend}, measured in {self.took_s:.0f} s"]
        for name, ranks_here in self.machines.items():
            numbers = f"rank{'s' if len(ranks_here) > 1 else ''} {', '.join(map(str, ranks_here))}"
            lines.append(f"  {name}: {numbers}; {self.interfaces[name].words}")
        connections = new_table("Connections")
        for column in ("ranks", "Mbit/s", "latency, ms"):
            connections.add_column(column, justify="right")
        for pair in self.pairs:
            ranks_of_pair = f"{pair.ranks[0]} - {pair.ranks[1]}"
            connections.add_row(ranks_of_pair, f"{pair.mbit_per_s:,.0f}", f"{pair.latency_ms:.3g}")
        connections.add_row(
            "all at once", f"{self.link.mbit_per_s:,.0f}", f"{self.link.latency_ms:.3g}"
        )
        times = new_table("Seconds per step, by size")
        times.add_column("hook")
        for size in self.exchanges:
            times.add_column(size, justify="right")
        for kinds in (self.exchanges, self.sharded):
            for row in zip(*kinds.values(), strict=True):
                times.add_row(row[0].candidate.label, *map(_cell, row))
        legend = CONNECTIONS_LEGEND + (f" {ONE_MACHINE}" if len(self.machines) == 1 else "")
        return text_of(*lines, connections, legend, times, LEGEND, *self.advice())

    def advice(self) -> list[str]:
        hooks = [self._hook(size, exchanges) for size, exchanges in self.exchanges.items()]
        return [*self._slow_connections(), *self._slow_interfaces(), *hooks]

    def _slow_connections(self) -> list[str]:
        machine = {rank: name for name, ranks in self.machines.items() for rank in ranks}
        warnings = []
        for where, one_machine in (("between machines", False), ("inside a machine", True)):
            pairs = [
                pair
                for pair in self.pairs
                if (machine[pair.ranks[0]] == machine[pair.ranks[1]]) is one_machine
            ]
            usual = statistics.median(pair.mbit_per_s for pair in pairs) if pairs else 0.0
            worst = min(pairs, key=lambda pair: pair.mbit_per_s, default=None)
            if worst is not None and worst.mbit_per_s < SLOW * usual:
                warnings.append(
                    f"Ranks {worst.ranks[0]} and {worst.ranks[1]} reach"
                    f" {bandwidth(worst.mbit_per_s)} where {bandwidth(usual)} is usual {where}:"
                    " every all-reduce waits for the slowest connection. Check this one first."
                )
        return warnings

    def _slow_interfaces(self) -> list[str]:
        reached = self.link.mbit_per_s
        slow = [
            (name, interface)
            for name, interface in self.interfaces.items()
            if interface.rated_mbit_per_s and reached < UNUSED * interface.rated_mbit_per_s
        ]
        if len(self.machines) == 1 or not slow:
            return []
        name, interface = slow[0]
        others = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        return [
            f"{name}{others} sends over {interface.words}, but reaches {bandwidth(reached)}. Is it"
            " the right one? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another (gloo takes no"
            " exclusion such as ^lo). If it is, look at what else uses the network."
        ]

    def _hook(self, size: str, exchanges: list[Exchange]) -> str:
        plain = exchanges[0]
        spends = (
            f"{size} parameters: with plain DDP a step spends {_duration(plain.seconds)} on the"
            " network"
        )
        if self.step_ms is None:
            return (
                f"{spends}. If it computes for {_duration(plain.seconds / SMALL)} or more, nothing"
                ' is needed. Otherwise begin with hook="auto", which measures and chooses;'
                ' hook="diloco" sends the least. --step-ms names one.'
            )
        computing = f"beside {self.step_ms:g} ms of computing"
        limit = SMALL * self.step_ms / 1e3
        if plain.seconds <= limit:
            return f"{spends}, {computing}: nothing needed."
        small = [exchange for exchange in exchanges if exchange.seconds <= limit]
        best = small[0] if small else min(exchanges, key=total_s)
        assert isinstance(best.candidate, Predicted)
        arguments = f'hook="{best.candidate.hook}"'
        if best.candidate.options:
            arguments += f", hook_options={dict(best.candidate.options)!r}"
        if best.between_nodes:
            arguments += ', ranks_per_node="auto"'
        verdict = "small" if small else "the least of all, but not small"
        return (
            f"{spends}. With {arguments} it would be {_duration(best.seconds)}: {verdict}"
            f" {computing}. Compare the last loss with plain DDP's."
        )


def _cell(exchange: Exchange) -> str:
    return f"{_figures(exchange.seconds)}{' *' if exchange.between_nodes else ''}"


def _figures(number: float) -> str:
    """Return three figures, and all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _duration(seconds: float) -> str:
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:g} s" if rounded >= 1 else f"{1e3 * rounded:g} ms"
