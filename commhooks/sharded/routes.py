"""How messages travel between ranks: directly, or first inside a node.

With N nodes of L ranks, rank (n, l) is rank l of node n. All-gather:

    1. between nodes   (n, l) gets the messages of (0, l) ... (N-1, l)
    2. inside a node   (n, l) gets what (n, 0) ... (n, L-1) have

so every message enters a node once, and not L times. Reduce-scatter:

    1. inside a node   (n, l) gets the exact sums over its node of the rows for (0, l) ... (N-1, l)
    2. between nodes   (n, l) gets those for itself from (0, l) ... (N-1, l), and adds them

so a rank sends N - 1 messages to other nodes, and not (N - 1) L.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from commhooks.comm.collectives import REDUCE_SCATTER, Pending, Send, gather_rows, start
from commhooks.comm.nodes import Nodes
from commhooks.sharded.memory import Memory
from commhooks.sharded.traffic import Traffic


class Route(Protocol):
    """Attributes:
    places: for each rank, the place of its message in a gathered buffer.
    peers: number of ranks that add up their rows in `exchange`.
    here: this rank's number among them.
    """

    places: Sequence[int]
    peers: int
    here: int

    def gather(
        self, messages: torch.Tensor, group: dist.ProcessGroup, what: str
    ) -> Callable[[], object]:
        """Begin to fill `messages` (`ranks x bytes`), of which this rank has written its own, and
        return what waits until they are there.
        """

    def reduce_inside(self, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the rows (`peers x numel`) that this rank exchanges."""

    def exchange(
        self, sent: torch.Tensor, arriving: torch.Tensor, group: dist.ProcessGroup, what: str
    ) -> Pending:
        """Send message i (`peers x bytes`) to peer i."""


class Direct:
    def __init__(self, ranks: int, rank: int, traffic: Traffic) -> None:
        self.places: Sequence[int] = range(ranks)
        self.peers = ranks
        self.here = rank
        self._traffic = traffic

    def gather(
        self, messages: torch.Tensor, group: dist.ProcessGroup, what: str
    ) -> Callable[[], object]:
        send = Send(messages[self.here], op="gather", into=messages)
        return start(send, group, self._traffic.counters, what, self._traffic.messages).wait

    def reduce_inside(self, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return rows

    def exchange(
        self, sent: torch.Tensor, arriving: torch.Tensor, group: dist.ProcessGroup, what: str
    ) -> Pending:
        send = Send(sent, op="all_to_all", into=arriving)
        return start(send, group, self._traffic.counters, what, self._traffic.messages)


class BetweenNodes:
    """`group`: all ranks, which must all make this. `rows`: memory for rows in another order."""

    def __init__(
        self, nodes: Nodes, group: dist.ProcessGroup, rows: Memory, traffic: Traffic
    ) -> None:
        self._nodes = nodes
        self._rows = rows
        self._traffic = traffic
        self.peers = nodes.count
        self.here = nodes.inter_node.rank()
        self._local = nodes.local_rank
        here = torch.tensor([self.here, self._local], device=rows.device)
        ranks = gather_rows(here, group, None, "the places of the ranks in nodes").tolist()
        # Buffers are `L x N`: the ranks of a node side by side, for one collective inside it.
        self.places: Sequence[int] = [local * nodes.count + node for node, local in ranks]
        order = sorted(range(len(ranks)), key=self.places.__getitem__)
        self._order = torch.tensor(order, device=rows.device)

    def gather(
        self, messages: torch.Tensor, group: dist.ProcessGroup, what: str
    ) -> Callable[[], object]:
        of_places = messages.view(self._nodes.ranks_per_node, self.peers, -1)
        of_place = of_places[self._local]  # N x bytes
        between = self._start(Send(of_place[self.here], op="gather", into=of_place), what)

        def copy_inside() -> None:
            between.wait()
            inside = Send(of_place, op="gather", into=of_places, over="intra_node")
            self._start(inside, what).wait()

        return copy_inside

    def reduce_inside(self, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # W x numel, by rank  ->  L x (N x numel)  ->  N x numel, summed over the node
        grouped = self._rows.take()
        by_place = grouped[: rows.nbytes].view(rows.dtype).view(rows.shape)
        torch.index_select(rows, 0, self._order, out=by_place)
        summed = rows.view(-1)[: rows.numel() // self._nodes.ranks_per_node]
        getattr(dist, REDUCE_SCATTER)(summed, by_place.view(-1), group=self._nodes.intra_node)
        self._rows.give_back(grouped)
        self._traffic.sent_whole(rows, inside=True)
        return summed.view(self.peers, -1)

    def exchange(
        self, sent: torch.Tensor, arriving: torch.Tensor, group: dist.ProcessGroup, what: str
    ) -> Pending:
        return self._start(Send(sent, op="all_to_all", into=arriving), what)

    def _start(self, send: Send, what: str) -> Pending:
        inside = send.over == "intra_node"
        group = self._nodes.intra_node if inside else self._nodes.inter_node
        return start(send, group, self._traffic.counters, what, self._traffic.messages)
