"""Reduce a bucket with a compressor without learned state: the hook call returns at once, each
future completes by itself.
"""

import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm import collectives
from commhooks.comm.collectives import Scope, Send, new_future
from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor, StepInfo
from commhooks.engine.consensus import SendComparison
from commhooks.engine.task import NO_STATE, Done, ExchangeTask
from commhooks.errors import HookRunError
from commhooks.gradients import precision
from commhooks.gradients.layout import Bucket
from commhooks.gradients.precision import keep_for_current_stream
from commhooks.gradients.source import held_weakly

Future = torch.futures.Future[torch.Tensor]
CALLBACK_S = 0.05
"""Seconds until a thread of the backend has left a callback. The destructor of a group waits for
that thread, in torch 2.13 with the GIL held.
"""


def reduce_immediately(
    compressor: Compressor[Any],
    bucket: Bucket,
    group: dist.ProcessGroup,
    counters: Counters | None = None,
    over: Scope = "all",
    comparison: SendComparison | None = None,
) -> Future:
    """Start the exchange of one bucket, and return a future of the reduced gradient. All ranks of
    `group` must call this, in the same order. `over`: which ranks `group` consists of, for the
    counters.

    The part of the exchange after the collective runs in a callback of the future; no bucket waits
    for another. Raises HookRunError if the exchange yields a `Verdict` or sends more than once, and
    on all ranks if `comparison` finds different Sends.
    """
    flat, name = bucket.flat, compressor.name
    # passes before this one
    number = 0 if counters is None else max(0, counters.backward_passes - 1)
    with contextlib.nullcontext() if counters is None else counters.clocks.measure(flat.device):
        exchange = compressor.exchange(
            flat, None, NO_STATE, StepInfo(number, group.size(), rank=group.rank())
        )
        task = ExchangeTask(exchange, flat, name, expects_verdict=False)
        step = task.advance(None)
        if comparison is not None:
            if isinstance(step, Send):
                comparison.agree(bucket.index, step)
            comparison.end()
        if isinstance(step, Done):
            done = new_future(flat.device)
            done.set_result(step.result)
            return done
        assert isinstance(step, Send)
        step.over = over
        if not step.last:
            raise HookRunError(
                f"the exchange of {name}: put last=True on its only Send; a compressor that is not"
                " transactional sends once"
            )
        pending = collectives.start(
            step, group, counters, "" if counters is None else f"bucket {bucket.index}"
        )
        if step.meanwhile is not None:
            step.meanwhile()
    answered = None if counters is None else counters.clocks.left_to_ddp(flat.device)
    new_answer = None if step.reduces else pending.answer
    what, group_if_alive = pending.what, held_weakly(group)

    def finish(sent: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # This runs in a thread of the backend. Hold no reference to the process group: if it were
        # the last one, the group would be destroyed in its own thread, which aborts the process.
        try:
            sent.value()
        except RuntimeError as error:
            raise _error_of(what, group_if_alive, error) from error
        # On CUDA the callback has its own stream, and these tensors are freed before the kernels
        # that read them run.
        if precision.has_streams(flat.device):
            keep_for_current_stream(_tensors_in(task.exchange))
            if new_answer is not None:
                keep_for_current_stream([new_answer])
        # The result of a sparse all-reduce is available only in the future.
        end = task.advance(sent.value()[0] if new_answer is None else new_answer)
        if not isinstance(end, Done):
            raise HookRunError(f"the exchange of {name} sends again after its last Send")
        if answered is not None:
            answered()
        return end.result

    return pending.future().then(finish)


def _error_of(
    what: str, group: Callable[[], dist.ProcessGroup], error: RuntimeError
) -> BaseException:
    """Call `collective_error` for a callback, in a thread that may hold the last reference to the
    group.
    """
    found: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def look() -> None:
        try:
            alive = group()
            found.put(collectives.collective_error(what, alive, error))
            time.sleep(CALLBACK_S)
        except BaseException as other:
            found.put(other)

    threading.Thread(target=look, name="commhooks failed collective", daemon=True).start()
    return found.get()


def _tensors_in(exchange: object) -> Iterator[torch.Tensor]:
    while inspect.isgenerator(exchange):
        yield from (
            each
            for each in inspect.getgeneratorlocals(exchange).values()
            if isinstance(each, torch.Tensor)
        )
        exchange = exchange.gi_yieldfrom
