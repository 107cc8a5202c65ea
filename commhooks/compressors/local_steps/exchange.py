"""One bucket of weights in an outer step (Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
Models, 2023, algorithm 1).

Between two outer steps each rank m trains its own weights theta_m. Common to all ranks are the anchor A, where they
began, and the momentum v of the outer optimizer, which is torch's SGD with Nesterov momentum:

    g = mean over the ranks of A - theta_m
    v = mu v + g
    A = A - lr (g + mu v)

The readable form is in `reference.py`.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.collective import Send
from commhooks.comm.wire import all_finite
from commhooks.compressors.base import Compressor, Exchange, State, StateField, StepInfo, Verdict
from commhooks.compressors.local_steps.options import LocalSteps
from commhooks.gradients.layout import BucketLayout

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

    The first step of all sends nothing: the weights, which are those of all ranks, become the anchor.

    Args:
        flat: the weights of this rank, 1-D, in float32 (float64 for weights in float64).
    """
    slots = [(slot.name, slot.of(flat)) for slot in work.layout.slots]
    anchor, momentum = state[ANCHOR.key], state[MOMENTUM.key]
    if any(name not in anchor for name, _ in slots):
        yield Verdict(torch.ones((), dtype=torch.bool, device=flat.device))
        anchor.update((name, part.clone()) for name, part in slots)
        return None
    for name, part in slots:
        torch.sub(anchor[name], part, out=part)  # 1  d = A - theta
    good = yield from _mean(flat, work, state, step)  # 2  g
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


def chosen(good: torch.Tensor | bool, if_true: torch.Tensor, if_false: torch.Tensor) -> torch.Tensor:
    if isinstance(good, bool):
        return if_true if good else if_false
    return torch.where(good, if_true, if_false)


def _mean(
    flat: torch.Tensor, work: Workspace, state: State, step: StepInfo
) -> Generator[Send | Verdict, Any, torch.Tensor | bool]:
    """Replace `flat` by its mean over the ranks. Returns whether this outer step is committed."""
    if work.wire is None:
        yield Send(flat.div_(step.world_size), what="differences", last=True)
        good: torch.Tensor | bool = yield Verdict(all_finite(flat))
        return good
    exchange, answer, good = work.wire.exchange(flat, work.wire_work, state, step), None, False
    while True:  # as `yield from`, which keeps the answer to the verdict for itself
        try:
            yielded = exchange.send(answer)
        except StopIteration:
            return good
        answer = yield yielded
        if isinstance(yielded, Verdict):
            good = answer
