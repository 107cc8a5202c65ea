"""Predict bytes and seconds of the exchange on many nodes, from a plan and an alpha-beta model.

The model is that of `comm/link.py`. Between nodes only (`ranks_per_node`), each of L groups of N ranks exchanges its
share over the card of its node, which is as one group with all of it. Inside a node every gradient travels twice, in
its own dtype, as in an all-reduce.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commhooks.comm.link import Backend, Network
from commhooks.compressors.candidates import ALLREDUCE, BF16, INT4, INT8, Candidate, powersgd
from commhooks.compressors.local_steps.options import LocalSteps
from commhooks.compressors.units import Unit
from commhooks.hook.plan_table import text_of
from commhooks.hook.request import HookRequest
from commhooks.tools.long_link import exchange_s
from commhooks.tools.named_model import NamedModel

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
    nodes: int
    ranks_per_node: int
    bandwidth: float
    """Between nodes, bit/s of a node."""
    inside: float
    """Inside a node, bit/s of a rank."""
    latency: float
    """Seconds per message between nodes."""
    backend: Backend = "nccl"


@dataclass(frozen=True)
class Prediction:
    """The exchange of one step."""

    hook: str
    """Its name and main option."""
    leaving: float
    """Bytes that leave a node."""
    seconds: float
    between_nodes: bool
    """With `ranks_per_node`."""


def predict(candidate: Candidate, model: NamedModel, cluster: Cluster, **limits: Any) -> list[Prediction]:
    """The predictions for one hook: among all ranks, and between nodes if it can. `limits`: as of `model.planned`."""
    request = HookRequest.parse(candidate.hook, hook_options=candidate.options, wrapper=candidate.wrapper)
    plan, compressor = model.planned(request, **limits)
    ranks = getattr(compressor.config, "rank_words", None)
    hook = compressor.name if ranks is None else f"{compressor.name}, {ranks}"
    hook += f", {compressor.wire}" if compressor.wire and compressor.Config.own_wire is None else ""
    counted = plan.bytes_after + plan.flag_bytes
    found = []
    for between_nodes in (False, True):
        if between_nodes and (compressor.not_between_nodes() or cluster.ranks_per_node == 1):
            continue
        together = 1 if between_nodes else cluster.ranks_per_node  # ranks of a node in one group
        network = Network(cluster.nodes * together, cluster.bandwidth, cluster.latency, together, cluster.backend)
        if between_nodes and isinstance(compressor.config, LocalSteps):  # each rank of a node sends all of it
            counted *= cluster.ranks_per_node
        seconds = exchange_s(compressor, network, counted, len(plan.bucket_names))
        if between_nodes:
            seconds += Network(cluster.ranks_per_node, cluster.inside).seconds(plan.bytes_before)
        leaving = network.leaving(counted, compressor.collectives)
        found.append(Prediction(hook, leaving, seconds, between_nodes))
    return found


def cluster_table(predictions: Sequence[Prediction], cluster: Cluster) -> str:
    """The predictions as text, one row per hook."""
    from rich.table import Table

    link = f"{cluster.bandwidth / 1e9:g} Gbit/s between nodes, {cluster.backend}"
    unit = Unit.of(max(each.leaving for each in predictions))
    shown = Table(title=f"{cluster.nodes} nodes of {cluster.ranks_per_node} ranks, {link}")
    shown.add_column("hook")
    for column in (f"{unit.name} leave a node", "exchange, ms", f"with ranks_per_node: {unit.name}", "exchange, ms"):
        shown.add_column(column, justify="right")
    for hook in dict.fromkeys(each.hook for each in predictions):
        cells = [hook]
        for each in predictions:  # among all ranks, then between nodes
            if each.hook == hook:
                cells += [unit.number(each.leaving), f"{1e3 * each.seconds:.4g}"]
        shown.add_row(*cells)
    return text_of(shown) + ASSUMED
