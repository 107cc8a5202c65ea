"""Interleave the exchanges of all buckets of one backward pass.

Collectives are issued only inside hook calls, in bucket order, so that every rank issues the same
sequence. The call for a bucket starts its exchange. Then each earlier exchange that has another
Send advances by one Send: with two Sends, P of bucket k, then Q of bucket k - 1. The call for the
last bucket runs all remaining Sends.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commhooks.comm.collectives import Pending, Send, new_future
from commhooks.compressors.base import StepInfo, Verdict
from commhooks.engine.consensus import SendComparison
from commhooks.engine.task import Done, ExchangeTask
from commhooks.gradients.loss_scale import LossScale

Issue = Callable[[Send], Pending | None]


class RunningExchange:
    """Runs the exchange of one bucket, with at most one pending collective.

    `issue` starts a collective for this bucket; it returns None if the ranks disagree, and the
    exchange is then not resumed.

    Attributes:
        result: the averaged gradient after the commit: the bucket, unless the exchange returns
            another tensor.
        finite: whether everything received is finite (0-dim bool tensor); set by the verdict.
        has_send_left: whether the exchange will issue another collective after the pending one.
    """

    finite: torch.Tensor

    def __init__(self, task: ExchangeTask, flat: torch.Tensor, issue: Issue) -> None:
        self.flat = flat
        self.result = flat
        self.future = new_future(flat.device)
        self.has_send_left = False
        self._task = task
        self._issue = issue
        self._pending: Pending | None = None

    def finish(self) -> None:
        """Wait for the pending collectives and advance: up to the verdict, or after the verdict to
        the end.
        """
        while self._pending is not None:
            self.advance()

    def close(self) -> Pending | None:
        """Close the exchange of an abandoned pass.

        Return the pending collective if it may still write the bucket. Suppress exceptions of the
        exchange, because they would hide the error that ended the pass.
        """
        with contextlib.suppress(Exception):
            self._task.exchange.close()
        pending = self._pending
        self._pending = None
        self.has_send_left = False
        return pending if pending is not None and pending.writes(self.flat) else None

    def advance(self, verdict: torch.Tensor | bool | None = None) -> None:
        """Resume the exchange and issue its next Send.

        The exchange receives the result of its pending collective. Without one it receives
        `verdict`: None at the beginning, or the verdict of the whole pass.
        """
        answer = verdict if self._pending is None else self._pending.wait()
        self._pending = None
        self.has_send_left = False
        step = self._task.advance(answer)
        if isinstance(step, Done):
            self.result = step.result
        elif isinstance(step, Verdict):
            self.finite = step.finite
        else:
            self._pending = self._issue(step)
            self.has_send_left = self._pending is not None and not step.last
            if self._pending is not None and step.meanwhile is not None:
                step.meanwhile()


def finish_sends(running: Sequence[RunningExchange]) -> None:
    """Run all exchanges up to their verdicts, in turns: one Send per exchange, in bucket order."""
    has_send_left = True
    while has_send_left:
        has_send_left = False
        for exchange in running:
            if exchange.has_send_left:
                exchange.advance()
                has_send_left = True
    for exchange in running:
        exchange.finish()


@dataclass(eq=False)
class BackwardPass:
    """Runs the exchanges of one backward pass, in bucket order; all ranks run the same sequence.

    Attributes:
        compressing: whether compression has begun.
        step_at_most: upper bound of the step's number.
        step_label: the number in messages: "7", or "<= 7" if the host has not read the outcomes of
            earlier passes.
        comparison: None if all Sends were compared before.
        compresses: whether at least one parameter is compressed in this pass.
    """

    group: dist.ProcessGroup
    compressing: bool
    loss_scale: LossScale
    step: StepInfo
    step_at_most: int
    step_label: str
    comparison: SendComparison | None = None
    compresses: bool = False
    running: list[RunningExchange] = field(default_factory=list)

    def add(self, exchange: RunningExchange) -> None:
        self.running.append(exchange)
        exchange.advance()
        for earlier in self.running[:-1]:
            if earlier.has_send_left:
                earlier.advance()

    def drain(self) -> torch.Tensor:
        """Run and wait for all remaining Sends.

        Return whether everything received is finite (0-dim bool tensor). Raises HookRunError on all
        ranks if their Sends differ.
        """
        finish_sends(self.running)
        if self.comparison is not None:
            self.comparison.end()
        return torch.stack([exchange.finite for exchange in self.running]).all()

    def commit(self, good: torch.Tensor | bool) -> None:
        # With nodes each exchange has one more Send, inside the node: start all of them, then wait.
        for exchange in self.running:
            exchange.advance(good)
        for exchange in self.running:
            exchange.finish()

    def fulfil(self) -> None:
        for exchange in self.running:
            exchange.future.set_result(exchange.result)
        self.running.clear()  # release the buckets, because DDP may rebuild them now

    def abandon(self) -> list[Pending]:
        """Close all exchanges; return the collectives that may still write into a bucket."""
        pending = [exchange.close() for exchange in self.running]
        self.running.clear()
        return [collective for collective in pending if collective is not None]
