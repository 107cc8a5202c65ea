"""Run compressors without learned state: each hook call returns at once, and DDP waits for the futures."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm import collective
from commhooks.comm.clocks import has_clock
from commhooks.comm.collective import Send, new_future
from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor, StepInfo, Verdict
from commhooks.engine.state import LearnedState
from commhooks.errors import HookRunError
from commhooks.gradients.bucket import Bucket

Future = torch.futures.Future[torch.Tensor]
_NOTHING = LearnedState()
"""The empty state that these compressors receive."""


def reduce_at_once(
    compressor: Compressor[Any], bucket: Bucket, group: dist.ProcessGroup, counters: Counters | None = None
) -> Future:
    """Start the exchange of one bucket. All ranks must call this, in the same order. The future holds the reduced
    gradient.

    The part of the exchange after the collective runs in a callback of the future; no bucket waits for another.

    Raises:
        HookRunError: the exchange yields a `Verdict`, or sends more than once.
    """
    flat = bucket.flat
    exchange = compressor.exchange(flat, None, _NOTHING, StepInfo(0, group.size()))

    def go_on(answer: torch.Tensor | None) -> Send | torch.Tensor:
        """Resume the exchange; returns its next collective or its result."""
        try:
            yielded = exchange.send(answer)
        except StopIteration as end:
            return flat if end.value is None else end.value
        if isinstance(yielded, Verdict):
            raise HookRunError(f"the exchange of {compressor.name} asks for a verdict, but it is not transactional")
        return yielded

    step = go_on(None)
    if not isinstance(step, Send):
        done = new_future(flat.device)
        done.set_result(step)
        return done
    if not step.last:
        raise HookRunError(f"the exchange of {compressor.name} sends more than once, but it is not transactional")

    def finish(sent: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        result = go_on(sent.value()[0])
        assert isinstance(result, torch.Tensor)
        return result

    return collective.start(step, group, counters, f"bucket {bucket.index}").future().then(finish)


def run_with_clocks(run: Callable[[], Future], device: torch.device, counters: Counters) -> Future:
    """Call a hook whose future DDP waits for; time the call and the wait."""
    if not has_clock(device):
        return run()
    with counters.clocks.codec(device):
        future = run()
    answered = counters.clocks.left_to_ddp(device)

    def note(answer: Future) -> torch.Tensor:
        answered()
        return answer.value()

    return future.then(note)
