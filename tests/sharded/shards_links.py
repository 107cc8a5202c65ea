"""Machines of several ranks in one process: each rank is a thread, exchanges go through memory, and
the bytes that leave each machine are counted.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from commhooks.comm.collectives import REDUCE_SCATTER, Send
from commhooks.sharded import routes
from commhooks.sharded.gather import GatherWeights
from commhooks.sharded.layout import UnitParameter
from commhooks.sharded.options import Shards
from commhooks.sharded.passes import Passes
from commhooks.sharded.routes import BetweenNodes, Direct, Route
from commhooks.sharded.scatter import ScatterGradients
from commhooks.sharded.traffic import Traffic
from commhooks.sharded.unit_codecs import UnitCodecs
from commhooks.sharded.units import UnitLayout


@dataclass(frozen=True)
class Group:
    ranks: Sequence[int]
    here: int

    def rank(self) -> int:
        return self.ranks.index(self.here)

    def size(self) -> int:
        return len(self.ranks)


class Links:
    """`machines`: the ranks of each. `left`: bytes that have left each machine."""

    def __init__(self, machines: Sequence[Sequence[int]]) -> None:
        self.machines = machines
        self.ranks = sum(map(len, machines))
        self.left: Counter[int] = Counter()
        self._barrier = threading.Barrier(self.ranks, timeout=60)
        self._shown: list[Any] = [None] * self.ranks

    def wait(self) -> None:
        """Wait for all ranks."""
        self._barrier.wait()

    def machine(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.machines) if rank in ranks)

    def shown(self, tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
        """Return what the ranks of `group` show. All ranks must call this."""
        self._shown[group.here] = tensor.clone()
        self.wait()
        tensors = [self._shown[rank] for rank in group.ranks]
        self.wait()
        return tensors

    def start(self, send: Send, group: Any, *_: Any) -> Any:
        assert send.into is not None
        all_shown = self.shown(send.tensor, group)
        for place, (rank, tensor) in enumerate(zip(group.ranks, all_shown, strict=True)):
            arriving = tensor if send.op == "gather" else tensor[group.rank()]
            send.into[place].copy_(arriving)
            if self.machine(rank) != self.machine(group.here):
                self.left[self.machine(rank), group.here] += arriving.nbytes
        return SimpleNamespace(wait=lambda: None)

    def reduce_scatter(self, output: torch.Tensor, rows: torch.Tensor, *, group: Group) -> None:
        assert len({self.machine(rank) for rank in group.ranks}) == 1  # inside a machine
        total = torch.stack(self.shown(rows, group)).sum(0)
        output.copy_(total.view(group.size(), -1)[group.rank()])

    def gather_rows(self, row: torch.Tensor, group: Any, *_: Any) -> torch.Tensor:
        return torch.stack(self.shown(row, group))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` for each rank, all at a time, and return the results."""
        results: list[Any] = [None] * self.ranks

        def run_one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(self.ranks)]
        collectives = SimpleNamespace(**{REDUCE_SCATTER: self.reduce_scatter})
        with (
            mock.patch.object(routes, "start", self.start),
            mock.patch.object(routes, "gather_rows", self.gather_rows),
            mock.patch.object(routes, "dist", collectives),
        ):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def left_by(self, machine: int) -> int:
        return sum(size for (sender, _), size in self.left.items() if sender == machine)


class Rank:
    """The collectives of a unit with one weight, of `numel` elements on this rank."""

    def __init__(self, links: Links, rank: int, numel: int, *, between_nodes: bool) -> None:
        self.rank = rank
        self.group: Any = Group(range(links.ranks), rank)
        real = torch.float32
        weight = UnitParameter(("w",), (links.ranks, numel), real, real, real, numel)
        codecs = UnitCodecs(
            Shards(),
            [UnitLayout("unit", (weight,), gathers=1)],
            torch.device("cpu"),
            ranks=links.ranks,
            nodes=len(links.machines) if between_nodes else links.ranks,
            native=False,
        )
        ((for_weights, for_gradients),) = codecs.codecs
        traffic = Traffic()
        route: Route = Direct(links.ranks, rank, traffic)
        if between_nodes:
            machine = links.machine(rank)
            place = links.machines[machine].index(rank)
            peers = [ranks[place] for ranks in links.machines]
            nodes: Any = SimpleNamespace(
                count=len(peers),
                ranks_per_node=len(links.machines[machine]),
                local_rank=place,
                intra_node=Group(links.machines[machine], rank),
                inter_node=Group(peers, rank),
            )
            route = BetweenNodes(nodes, self.group, codecs.grouped, traffic)
        self._gather = GatherWeights(
            "unit", links.ranks, for_weights, route, codecs.gathered, traffic
        )
        self._scatter = ScatterGradients(
            "unit", for_gradients, route, codecs.scattered, Passes(), traffic, logs=False
        )

    def gather(self, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(self.group.size() * weights.numel())
        self._gather(output, weights, self.group).wait()
        return output

    def scatter(self, gradients: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(gradients.numel() // self.group.size())
        self._scatter(output, gradients.clone(), self.group, dist.ReduceOp.AVG)
        return output
