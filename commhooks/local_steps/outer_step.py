"""The weights of one buffer in an outer step (Douillard et al., DiLoCo: Distributed Low-Communication Training of
Language Models, 2023, algorithm 1).

Between two outer steps each rank m trains its own weights theta_m. All ranks share the anchor A, from which they
started, and the momentum v of the outer optimizer, which is SGD with Nesterov momentum:

    g = mean over the ranks of A - theta_m
    v = mu v + g
    A = A - lr (g + mu v)

`reference.py` has the readable form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.collectives import Send
from commhooks.comm.wire import all_finite
from commhooks.compressors.base import Compressor, Exchange, State, StateField, StepInfo, Verdict, with_verdict
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import chosen

ANCHOR = StateField("anchor")
"""A: the weights on which all ranks have agreed last."""
MOMENTUM = StateField("outer_momentum")
"""v: of the outer optimizer."""
SAMPLED_EVERY = 64


@dataclass
class OuterStepWorkspace:
    """One buffer: the weights that are exchanged as one tensor, and what their outer steps need.

    Attributes:
        wire: the compressor that averages the differences; None: float32.
        wire_work: its workspace.
        sample: every 64th element of g in the latest outer step that was not discarded.
        measured: of the latest outer step: the squared norms of g, of its sample and of the sample before, and the
            inner product of both samples.
    """

    layout: BucketLayout
    wire: Compressor[Any] | None
    wire_work: Any
    sample: torch.Tensor | None = None
    measured: torch.Tensor | None = None

    def measure(self, g: torch.Tensor, good: torch.Tensor | bool) -> None:
        """Note the norm of g (1-D), and its inner product with the g before. `good`: the round is not discarded."""
        new = g[::SAMPLED_EVERY].clone()
        before = self.sample if self.sample is not None else torch.zeros_like(new)
        self.measured = torch.stack([g.dot(g), new.dot(new), before.dot(before), new.dot(before)])
        self.sample = chosen(good, new, before)


def norm_and_cosine(measured: Sequence[torch.Tensor]) -> tuple[float | None, float | None]:
    """Compute the norm of g, and its cosine with the g before, from `OuterStepWorkspace.measured` of all buffers of an
    outer step. None where there is none. Waits for an accelerator."""
    if not measured:
        return None, None
    squares, new, before, both = torch.stack([each.cpu() for each in measured]).sum(0).tolist()
    return math.sqrt(squares), both / math.sqrt(new * before) if new * before > 0 else None


def outer_step(
    flat: torch.Tensor, work: OuterStepWorkspace, state: State, step: StepInfo, lr: float, mu: float
) -> Exchange:
    """Replace the weights of this rank by the new anchor. If a number is not finite on any rank, by the old one: the
    round is discarded.

    Args:
        flat: the weights of this rank, 1-D, in float32 (float64 for weights in float64).
        lr, mu: learning rate and momentum of the outer optimizer.
    """
    slots = [(slot.name, slot.of(flat)) for slot in work.layout.slots]
    anchor, momentum = state[ANCHOR.key], state[MOMENTUM.key]
    for name, part in slots:
        torch.sub(anchor[name], part, out=part)  # 1  d = A - theta
    if work.wire is None:
        yield Send(flat.div_(step.world_size), what="differences", last=True)  # 2  g
        good = yield Verdict(all_finite(flat))
    else:
        _, good = yield from with_verdict(work.wire.exchange(flat, work.wire_work, state, step))
    work.measure(flat, good)
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
