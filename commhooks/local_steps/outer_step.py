"""Run the outer step of DiLoCo on one buffer of weights (Douillard et al., DiLoCo: Distributed
Low-Communication Training of Language Models, 2023, algorithm 1).

Between two outer steps rank i trains its own weights theta_i with the inner optimizer. All ranks
share the anchor, which is the paper's theta, and v, the momentum of the outer optimizer (SGD with
Nesterov momentum mu). An outer step computes

    delta   = mean over the ranks of (anchor - theta_i)         the outer gradient
    v       = mu v + delta
    anchor  = anchor - lr (delta + mu v)
    theta_i = anchor

`reference.py` computes the same in a few lines of plain torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.comm.collectives import Send
from commhooks.comm.packing import all_finite
from commhooks.compressors.base import (
    Compressor,
    Exchange,
    State,
    StateField,
    StepInfo,
    Verdict,
    with_verdict,
)
from commhooks.compressors.unit_plan import UnitPlan
from commhooks.engine.streams import wait_for_copies
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.loss_scale import chosen
from commhooks.local_steps.offload import fetch, put_back

ANCHOR = StateField("anchor")
"""The weights with which all ranks have started the round."""
MOMENTUM = StateField("outer_momentum")
"""v, the momentum of the outer optimizer. A missing entry means zeros."""
SAMPLED_EVERY = 64


@dataclass
class OuterStepWorkspace:
    """Holds a buffer of weights, and what its outer steps need.

    Attributes:
        plans: how the differences of each parameter are sent.
        wire: the compressor that averages the differences; None: float32.
        offloaded: whether anchor and momentum are kept in host memory, while the buffer is on an
            accelerator.
        weight: of this rank's difference in the mean; 1 unless some ranks have not trained in the
            round.
        sample: every 64th element of delta in the latest outer step that was not discarded.
        measured: numbers about the latest outer step: the squared norms of delta, of its sample and
            of the previous sample, and the inner product of both samples.
    """

    layout: BucketLayout
    plans: Sequence[UnitPlan]
    wire: Compressor[Any] | None
    offloaded: bool = False
    weight: float = 1.0
    sample: torch.Tensor | None = None
    measured: torch.Tensor | None = None

    def measure(self, delta: torch.Tensor, good: torch.Tensor | bool) -> None:
        new = delta[::SAMPLED_EVERY].clone()
        before = self.sample if self.sample is not None else torch.zeros_like(new)
        self.measured = torch.stack(
            [delta.dot(delta), new.dot(new), before.dot(before), new.dot(before)]
        )
        self.sample = chosen(good, new, before)


def norm_and_cosine(measured: Sequence[torch.Tensor]) -> tuple[float | None, float | None]:
    """Return the norm of delta, and its cosine with the previous delta; None where undefined. Waits
    for an accelerator. `measured` has `OuterStepWorkspace.measured` of all buffers of an outer
    step.
    """
    if not measured:
        return None, None
    squares, new, before, both = (
        torch.stack([numbers.cpu() for numbers in measured]).sum(0).tolist()
    )
    return math.sqrt(squares), both / math.sqrt(new * before) if new * before > 0 else None


def outer_step(
    flat: torch.Tensor, work: OuterStepWorkspace, state: State, step: StepInfo, lr: float, mu: float
) -> Exchange:
    """Replace the weights in `flat` (this rank's, 1-D, in float32, or float64 for weights in
    float64) by the new anchor. If a number is not finite on any rank, the round is discarded:
    anchor and momentum stay, and the weights are set to the old anchor. `lr`, `mu`: learning rate
    and momentum of the outer optimizer.
    """
    # each `part` below is a view of `flat`
    slots = [(slot.name, slot.of(flat)) for slot in work.layout.slots]
    anchor, momentum = state[ANCHOR.key], state[MOMENTUM.key]
    if work.offloaded:
        anchor = fetch(anchor, work.layout.names, flat.device)
        wait_for_copies(flat.device)
    for name, part in slots:
        torch.sub(anchor[name], part, out=part)  # anchor - theta_i
        if work.weight != 1.0:
            part.mul_(work.weight)
    if work.wire is None:
        # the sum over the ranks is delta
        yield Send(flat.div_(step.world_size), what="differences", last=True)
        good = yield Verdict(all_finite(flat))
    else:
        # Do not keep this workspace from round to round, because it is as large as the buffer.
        wire_work = work.wire.workspace(work.layout, work.plans)
        _, good = yield from with_verdict(work.wire.exchange(flat, wire_work, state, step))
    work.measure(flat, good)
    if work.offloaded:
        momentum = fetch(momentum, work.layout.names, flat.device)
        wait_for_copies(flat.device)
    for name, part in slots:  # part = delta
        # Use no fused operation, whose bits would depend on the processor.
        if mu:
            before = momentum.get(name, torch.zeros_like(part))
            after = (before * mu).add_(part)  # v = mu v + delta
            momentum[name] = chosen(good, after, before)
            part.add_(after * mu)
        moved = anchor[name] - part.mul_(lr)  # anchor - lr (delta + mu v)
        anchor[name].copy_(chosen(good, moved, anchor[name]))
        part.copy_(anchor[name])  # theta_i = anchor
    if work.offloaded:
        put_back(anchor, state[ANCHOR.key], flat.device)
        put_back(momentum, state[MOMENTUM.key], flat.device)
    return None
