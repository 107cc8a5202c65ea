"""Predict bytes and seconds of the exchange on many nodes, from a plan and an alpha-beta model.

The model is that of `comm/link.py`. Between nodes only (`ranks_per_node`), each of L groups of N ranks exchanges its
share over the card of its node, which is as one group with all of it. Inside a node every gradient travels twice, in
its own dtype, as in an all-reduce.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commhooks.comm.link import Backend, Network
from commhooks.compressors.base import Compressor
from commhooks.compressors.candidates import ALLREDUCE, BF16, INT4, INT8, powersgd
from commhooks.compressors.units import Unit
from commhooks.hook.model_plan import ModelPlan

CANDIDATES = (
    *(ALLREDUCE, BF16, INT8, INT4),
    *(powersgd(rank, {}) for rank in (16, 4, 1)),
    powersgd(1, {}, wrapper="int8"),
)
ASSUMED = (
    "Assumed: the ranks of a node have consecutive numbers and share its network card, nothing overlaps with the "
    "backward pass, no time for the codec (see `commhooks plan` without --nodes). Compared with measurements on gloo, "
    "two nodes of two ranks, only."
)


@dataclass(frozen=True)
class Cluster:
    """
    Attributes:
        nodes, ranks_per_node: how many.
        bandwidth: between nodes, bit/s of a node.
        inside: inside a node, bit/s of a rank.
        latency: seconds per message between nodes.
        backend: what carries the collectives.
    """

    nodes: int
    ranks_per_node: int
    bandwidth: float
    inside: float
    latency: float
    backend: Backend = "nccl"

    def between(self, together: int) -> Network:
        """The network between nodes. `together`: ranks of a node in one group: all, or one of each node."""
        return Network(self.nodes * together, self.bandwidth, self.latency, together, self.backend)


@dataclass(frozen=True)
class Prediction:
    """The exchange of one step.

    Attributes:
        hook: its name and main option.
        leaving: bytes that leave a node.
        seconds: of the exchange.
        between_nodes: with `ranks_per_node`.
    """

    hook: str
    leaving: float
    seconds: float
    between_nodes: bool


def predict(plan: ModelPlan, compressor: Compressor[Any], buckets: int, cluster: Cluster) -> list[Prediction]:
    """The predictions for one hook: among all ranks, and between nodes if it can.

    Args:
        plan: of the model, with this compressor.
        buckets: into how many buckets DDP divides the model.
    """
    ranks = getattr(compressor.config, "rank_words", None)
    hook = compressor.name if ranks is None else f"{compressor.name}, {ranks}"
    hook += f", {compressor.wire}" if compressor.wire and compressor.Config.own_wire is None else ""
    counted = plan.bytes_after + plan.flag_bytes
    where = {False: cluster.between(cluster.ranks_per_node)}
    if not compressor.not_between_nodes() and cluster.ranks_per_node > 1:
        where[True] = cluster.between(1)
    found = []
    for between_nodes, network in where.items():
        seconds = network.seconds(counted, compressor.collectives, buckets)
        if between_nodes:
            seconds += Network(cluster.ranks_per_node, cluster.inside).seconds(plan.bytes_before)
        leaving = network.leaving(counted, compressor.collectives)
        found.append(Prediction(hook, leaving, seconds, between_nodes))
    return found


def cluster_table(predictions: Sequence[Prediction], cluster: Cluster) -> str:
    """The predictions as text, one row per hook."""
    from rich.console import Console
    from rich.table import Table

    link = f"{cluster.bandwidth / 1e9:g} Gbit/s between nodes, {cluster.backend}"
    unit = Unit.of(max(each.leaving for each in predictions))
    shown = Table(title=f"{cluster.nodes} nodes of {cluster.ranks_per_node} ranks, {link}")
    shown.add_column("hook")
    for column in (f"{unit.name} leave a node", "exchange, ms", f"with ranks_per_node: {unit.name}", "exchange, ms"):
        shown.add_column(column, justify="right")
    for hook in dict.fromkeys(each.hook for each in predictions):
        found = {each.between_nodes: each for each in predictions if each.hook == hook}
        cells = [
            text
            for between in (False, True)
            for text in (
                (unit.number(found[between].leaving), f"{1e3 * found[between].seconds:.4g}")
                if between in found
                else ("", "")
            )
        ]
        shown.add_row(hook, *cells)
    console = Console(width=120, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get() + ASSUMED
