"""What one collective costs: an alpha-beta model.

A message costs a latency (alpha), and a byte 1 / bandwidth (beta). The ranks of a node share its network card. What
leaves a node for one collective, if it counts c bytes (see `Counters`), of W ranks, L of which are on each node:

    all-reduce   2 (W - 1) / W c. Messages one after another: 2 (W - 1) in a ring or 2 log2(W) in a tree, whichever is
                 less: NCCL chooses, gloo has rings
    all-to-all   each rank to each rank of other nodes: 2 L (W - L) / W c, W - L messages
    all-gather   NCCL: 2 (W - 1) / W c, a ring: W - 1 messages; gloo: as an all-to-all (`messages.py`)
"""

import math
from dataclasses import dataclass
from typing import Literal

from commhooks.comm.collective import Op

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True)
class Cost:
    """
    Attributes:
        sent: bytes that leave a node.
        messages: how many follow one another.
    """

    sent: float
    messages: float

    def seconds(self, bits_per_s: float, latency_s: float) -> float:
        """The time of the collective over such a link."""
        return (8 * self.sent / bits_per_s if self.sent else 0.0) + self.messages * latency_s


def collective_cost(op: Op, counted: float, ranks: int, together: int = 1, backend: Backend = "nccl") -> Cost:
    """
    Args:
        counted: counted bytes.
        together: how many of the ranks are on each node.
    """
    if op == "all_to_all" or (op == "gather" and backend == "gloo"):
        return Cost(2 * together * (ranks - together) / ranks * counted, ranks - together)
    steps = math.ceil(math.log2(ranks)) if backend == "nccl" else ranks - 1
    messages = ranks - 1 if op == "gather" else 2 * min(ranks - 1, steps)
    return Cost(2 * (ranks - 1) / ranks * counted, messages)
