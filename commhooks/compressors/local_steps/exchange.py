"""One bucket of weights in an outer step (Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
Models, 2023, algorithm 1).

Between two outer steps each rank m trains its own weights theta_m. Common to all ranks are the anchor A, where they
began, and the momentum v of the outer optimizer, which is torch's SGD with Nesterov momentum:

    g = mean over the ranks of A - theta_m
    v = mu v + g
    A = A - lr (g + mu v)

The readable form is in `reference.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.collective import Send
from commhooks.comm.wire import all_finite
from commhooks.compressors.base import Compressor, Exchange, State, StateField, StepInfo, Verdict, judged
from commhooks.compressors.local_steps.options import LocalSteps
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import chosen

ANCHOR = StateField("anchor")
"""A: the weights on which all ranks have agreed last."""
MOMENTUM = StateField("outer_momentum")
"""v: of the outer optimizer."""


@dataclass
class Workspace:
    """The buckets of one layout.

    Attributes:
        wire: what carries their differences; None for float32.
        wire_work: its workspace.
        squares: the squared norm of g in the latest outer step (0-dim).
    """

    layout: BucketLayout
    wire: Compressor[Any] | None
    wire_work: Any
    squares: torch.Tensor | None = None


def outer_step(flat: torch.Tensor, work: Workspace, state: State, step: StepInfo, options: LocalSteps) -> Exchange:
    """Replace this rank's weights by the new anchor. If a number is not finite on any rank, by the old one: the round
    is discarded.

    Args:
        flat: the weights of this rank, 1-D, in float32 (float64 for weights in float64).
    """
    slots = [(slot.name, slot.of(flat)) for slot in work.layout.slots]
    anchor, momentum = state[ANCHOR.key], state[MOMENTUM.key]
    for name, part in slots:
        torch.sub(anchor[name], part, out=part)  # 1  d = A - theta
    if work.wire is None:
        yield Send(flat.div_(step.world_size), what="differences", last=True)  # 2  g
        good = yield Verdict(all_finite(flat))
    else:
        _, good = yield from judged(work.wire.exchange(flat, work.wire_work, state, step))
    work.squares = flat.dot(flat)
    lr, mu = options.outer_lr, options.outer_momentum
    for name, part in slots:
        # Each operation rounds by itself: fused ones give other bits on other processors.
        if mu:
            before = momentum.get(name, torch.zeros_like(part))
            after = (before * mu).add_(part)  # 3  v = mu v + g
            momentum[name] = chosen(good, after, before)
            part.add_(after * mu)
        moved = anchor[name] - part.mul_(lr)  # 4  A = A - lr (g + mu v)
        anchor[name].copy_(chosen(good, moved, anchor[name]))
        part.copy_(anchor[name])  # 5  theta = A
    return None
