"""What a step of a model spends on the network that was measured, with each hook."""

import dataclasses
import re
from dataclasses import dataclass

import torch

from commhooks.comm.link import Backend, Link, Network
from commhooks.compressors.candidates import ALLREDUCE, BF16, INT8, Candidate, powersgd
from commhooks.errors import HookConfigError
from commhooks.tools.cluster import Cluster, predict
from commhooks.tools.named_model import NamedModel

PLAIN = dataclasses.replace(ALLREDUCE, label="plain DDP")
CANDIDATES = (
    *(PLAIN, BF16, INT8, powersgd(4, {})),
    *(Candidate(f"diloco, every {every} steps", "diloco", {"sync_every": every}) for every in (5, 30)),
)
"""From the one that changes the training least on."""
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True)
class Exchange:
    """What a step of a model spends on the network with one hook.

    Attributes:
        candidate: the hook.
        seconds: per step, on average.
        sent_bytes: that leave a machine, per step.
        between_nodes: it is the faster one with `ranks_per_node`.
    """

    candidate: Candidate
    seconds: float
    sent_bytes: float
    between_nodes: bool


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


def cluster_of(machines: list[list[int]], link: Link, inside_mbit_per_s: float, backend: Backend) -> Cluster:
    """The network that was measured as a model of it. Where the ranks cannot be divided into equal machines, each one
    counts as a machine."""
    ranks, sizes = sum(map(len, machines)), {len(each) for each in machines}
    together = sizes.pop() if len(machines) > 1 and len(sizes) == 1 else 1
    messages = Network(ranks, 1.0, backend=backend).messages("sum")
    between, inside = 1e6 * link.mbit_per_s, 1e6 * inside_mbit_per_s
    return Cluster(ranks // together, together, between, inside, link.latency_ms / 1e3 / messages, backend)


def exchanges(numel: float, cluster: Cluster) -> list[Exchange]:
    """Of each candidate, with DDP's usual buckets."""
    model, found = NamedModel(transformer(numel)), []
    for each in CANDIDATES:
        predicted = predict(each, model, cluster, total_steps=1)
        best = min(predicted[:1] if each is PLAIN else predicted, key=lambda one: one.seconds)
        found.append(Exchange(each, best.seconds, best.leaving, best.between_nodes))
    return found
