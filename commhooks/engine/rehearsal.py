"""Run the exchange of a compressor on copies of one bucket, without other ranks: to time it, and to look at what it
learns."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from commhooks.comm.link import synchronize
from commhooks.compressors.base import Compressor, StepInfo
from commhooks.compressors.observation import Look, Rehearsal
from commhooks.compressors.plan import UnitPlan
from commhooks.engine.average import average
from commhooks.engine.loopback import run_alone
from commhooks.engine.state import LearnedState
from commhooks.engine.task import ExchangeTask
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout


def rehearse(
    compressor: Compressor[Any],
    layout: BucketLayout,
    plans: Sequence[UnitPlan],
    gradient: torch.Tensor,
    rounds: int,
    look: Look | None = None,
) -> Rehearsal:
    """Reduce copies of `gradient`, 1-D, `rounds` times with learned state of their own; the first round begins with
    none. Needs memory for a copy, a workspace and that state.

    Args:
        look: called after the last round; see `Look`.
    """
    entered = time.perf_counter()
    state = LearnedState.of(compressor.state_fields)
    compresses = any(plan.compressed for plan in plans)
    work = compressor.workspace(layout, plans) if compresses else None
    copy = torch.empty_like(gradient)
    fastest = float("inf")
    with precision.full_precision(layout.device):
        for number in range(rounds):
            copy.copy_(gradient)
            synchronize(layout.device)
            began = time.perf_counter()
            if compresses:
                exchange = compressor.exchange(copy, work, state, StepInfo(number, world_size=1))
            else:
                wire_dtype = compressor.wire_dtype_for(copy.dtype)
                exchange = average(copy, wire_dtype, 1, judged=compressor.transactional)
            judged = compressor.transactional or not compresses
            run_alone([ExchangeTask(exchange, copy, compressor, judged=judged)], layout.device)
            synchronize(layout.device)
            fastest = min(fastest, time.perf_counter() - began)
        if look is not None:
            look(layout, gradient, state)
            synchronize(layout.device)
    return Rehearsal(fastest, time.perf_counter() - entered)
