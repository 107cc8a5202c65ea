"""Divide ranks into nodes: groups of ranks, usually machines, with fast communication inside."""

import os
import socket
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from commhooks.comm.collectives import gather_texts
from commhooks.comm.groups import new_group
from commhooks.errors import AttachError, listed, logger_of
from commhooks.gradients.source import held_weakly

logger = logger_of(__name__)

RanksPerNode = int | str | None


class Nodes:
    """Holds this rank's groups if the ranks form `count` nodes of equal size.

    `local_rank` is the rank in `intra_node`.
    """

    def __init__(self, intra_node: dist.ProcessGroup, inter_node: dist.ProcessGroup) -> None:
        self.local_rank = intra_node.rank()
        self.ranks_per_node = intra_node.size()
        self.count = inter_node.size()
        self._intra_node = held_weakly(intra_node)
        self._inter_node = held_weakly(inter_node)

    @property
    def description(self) -> str:
        return described(self.count, self.ranks_per_node)

    @property
    def intra_node(self) -> dist.ProcessGroup:
        return self._intra_node()

    @property
    def inter_node(self) -> dist.ProcessGroup:
        """The ranks with this local rank, one per node, in the order of the nodes."""
        return self._inter_node()


def described(nodes: int, ranks_per_node: int) -> str:
    return f"between {nodes} nodes of {ranks_per_node} ranks, each as one rank"


# The nodes of each group, by their ranks. A second run reuses the nodes of the first one: in torch
# 2.13 a group cannot be destroyed and made again with the same ranks, because it would connect to
# the old group's addresses.
_KNOWN: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Nodes]]" = (
    weakref.WeakKeyDictionary()
)


def places_of(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Gather the machine of each rank: its host name and its launcher (torchrun's GROUP_RANK).

    All ranks of `group` must call this.
    """
    machine = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}".strip()
    return gather_texts(machine, group, device, "the names of the nodes")


def ranks_by_place(places: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place, []).append(rank)
    return ranks


def find_nodes(
    ranks_per_node: RanksPerNode, group: dist.ProcessGroup, device: torch.device
) -> Nodes | None:
    """Divide the ranks of `group` into nodes; None if there is one node, or one rank per node.

    All ranks of `group` must call this. Rank 0 warns if `ranks_per_node` exceeds the world size.
    Raises AttachError on all ranks if the nodes have different numbers of ranks.

    Args:
        ranks_per_node: the number of consecutive ranks in a node. "auto": ranks started by the same
            launcher (torchrun's GROUP_RANK), or if that is unknown, with the same host name, form a
            node. None: no nodes.
    """
    if ranks_per_node is None:
        return None
    if ranks_per_node == "auto":
        places = places_of(group, device)
    else:
        places = [str(rank // int(ranks_per_node)) for rank in range(group.size())]
        # Do not fail, because a run may continue with fewer ranks. For a single rank the summary
        # has its own message.
        if 1 < group.size() < int(ranks_per_node) and group.rank() == 0:
            logger.warning(
                "ranks_per_node=%s, but there are only %s ranks: they count as one node, and the"
                " hook compresses between all of them, as without ranks_per_node. Give the number"
                " of ranks on one machine, or 'auto', which finds it out.",
                ranks_per_node,
                group.size(),
            )
    nodes = list(ranks_by_place(places).values())
    sizes = [len(ranks) for ranks in nodes]
    if len(set(sizes)) > 1:
        raise AttachError(
            f"ranks_per_node={ranks_per_node!r}: the nodes have {listed(sizes, ' and ')} ranks, and"
            " a hook between nodes needs the same number on each. Use ranks_per_node=None, which"
            " compresses between all ranks"
        )
    if len(nodes) == 1 or sizes[0] == 1:
        return None
    divisions = _KNOWN.setdefault(group, {})
    division = str(nodes)
    if division not in divisions:
        intra_node = new_group(nodes, group, device)
        inter_node = new_group(list(zip(*nodes, strict=True)), group, device)
        divisions[division] = Nodes(intra_node, inter_node)
    return divisions[division]
