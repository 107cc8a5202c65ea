"""Reduce a bucket with a compressor without learned state.

The hook call returns at once, and each future completes by itself.
"""

import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    """Start the exchange of one bucket, and return a future of the reduced gradient.

    All ranks of `group` must call this, in the same order. `over`: which ranks `group` consists of,
    for the counters.

    The part of the exchange after the collective runs in a callback of the future; no bucket waits
    for another. Raises HookRunError if the exchange yields a `Verdict` or sends more than once, and
    on all ranks if `comparison` finds different Sends.
    """
    flat = bucket.flat
    passes_before = 0 if counters is None else max(0, counters.backward_passes - 1)
    step = StepInfo(passes_before, group.size(), rank=group.rank())
    with contextlib.nullcontext() if counters is None else counters.clocks.measure(flat.device):
        exchange = compressor.exchange(flat, None, NO_STATE, step)
        task = ExchangeTask(exchange, flat, compressor.name, expects_verdict=False)
        send = _first_step(task, bucket, compressor.name, comparison)
        if isinstance(send, Done):
            done = new_future(flat.device)
            done.set_result(send.result)
            return done
        send.over = over
        where = "" if counters is None else f"bucket {bucket.index}"
        pending = collectives.start(send, group, counters, where)
        if send.meanwhile is not None:
            send.meanwhile()
    rest = _RestOfExchange(
        task,
        compressor.name,
        flat.device,
        pending.what,
        held_weakly(group),
        answer=None if send.reduces else pending.answer,
        answered=None if counters is None else counters.clocks.left_to_ddp(flat.device),
    )
    return pending.future().then(rest.run)


def _first_step(
    task: ExchangeTask, bucket: Bucket, name: str, comparison: SendComparison | None
) -> Send | Done:
    """Run an exchange up to its only Send, or to its end if it sends nothing."""
    send = task.advance(None)
    if comparison is not None:
        if isinstance(send, Send):
            comparison.agree(bucket.index, send)
        comparison.end()
    if isinstance(send, Done):
        return send
    assert isinstance(send, Send)  # `task` expects no verdict
    if not send.last:
        raise HookRunError(
            f"the exchange of {name}: put last=True on its only Send; a compressor that is not"
            " transactional sends once"
        )
    return send


@dataclass(frozen=True, eq=False)
class _RestOfExchange:
    """Runs the rest of an exchange, after its collective, in a thread of the backend.

    It holds no reference to the process group: if it were the last one, the group would be
    destroyed in its own thread, which aborts the process.

    Attributes:
        what: the collective, for messages.
        group: returns the process group; raises HookRunError once it was destroyed.
        answer: the result of the collective; None if it is what was sent, reduced in place.
        answered: called at the end, for the clocks.
    """

    task: ExchangeTask
    name: str
    device: torch.device
    what: str
    group: Callable[[], dist.ProcessGroup]
    answer: torch.Tensor | None
    answered: Callable[[], None] | None

    def run(self, sent: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        try:
            sent.value()
        except RuntimeError as error:
            raise _error_of(self.what, self.group, error) from error
        # On CUDA the callback has its own stream, and these tensors are freed before the kernels
        # that read them run.
        if precision.has_streams(self.device):
            keep_for_current_stream(_tensors_in(self.task.exchange))
            if self.answer is not None:
                keep_for_current_stream([self.answer])
        # The result of a sparse all-reduce is available only in the future.
        end = self.task.advance(sent.value()[0] if self.answer is None else self.answer)
        if not isinstance(end, Done):
            raise HookRunError(f"the exchange of {self.name} sends again after its last Send")
        if self.answered is not None:
            self.answered()
        return end.result


def _error_of(
    what: str, group: Callable[[], dist.ProcessGroup], error: RuntimeError
) -> BaseException:
    """Call `collective_error` in a thread, which may end as the last owner of the group."""
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def look() -> None:
        try:
            alive = group()
            errors.put(collectives.collective_error(what, alive, error))
            time.sleep(CALLBACK_S)
        except BaseException as failure:
            errors.put(failure)

    threading.Thread(target=look, name="commhooks failed collective", daemon=True).start()
    return errors.get()


def _tensors_in(exchange: object) -> Iterator[torch.Tensor]:
    while inspect.isgenerator(exchange):
        for value in inspect.getgeneratorlocals(exchange).values():
            if isinstance(value, torch.Tensor):
                yield value
        exchange = exchange.gi_yieldfrom
