"""The order in which the exchanges of all buckets run in one backward pass.

Collectives are issued only from inside hook calls, in bucket order, so that every rank issues the same sequence. A new
bucket starts its exchange; then each earlier exchange with a Send left takes one step: with two Sends, P of bucket k,
then Q of bucket k - 1. The last bucket runs all remaining Sends. The call for bucket k returns while its collective is
in flight.
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
    """The exchange of one bucket, with its pending collective.

    Args:
        task: the exchange, not begun yet.
        flat: the bucket's buffer.
        issue: starts a collective for this bucket. Returns None if the ranks disagree; the exchange is then not
            resumed.

    Attributes:
        result: holds the averaged gradient after the commit: the bucket, unless the exchange returns another tensor.
        finite: its verdict on everything received (0-dim bool tensor); set once no collective is left.
        has_send_left: a collective is pending, and the exchange will issue another one after it.
    """

    finite: torch.Tensor

    def __init__(self, task: ExchangeTask, flat: torch.Tensor, issue: Issue) -> None:
        self.flat = self.result = flat
        self.future = new_future(flat.device)
        self.has_send_left = False
        self._task = task
        self._issue = issue
        self._pending: Pending | None = None

    def finish(self) -> None:
        """Wait for the pending collectives: up to the verdict, or after the verdict to the end."""
        while self._pending is not None:
            self.advance()

    def close(self) -> Pending | None:
        """Close the exchange of an abandoned pass. Its exceptions are suppressed, because they would hide the error
        that ended the pass. Returns the pending collective if that may still write into the bucket."""
        with contextlib.suppress(Exception):
            self._task.exchange.close()
        pending, self._pending, self.has_send_left = self._pending, None, False
        return None if pending is None or not pending.writes(self.flat) else pending

    def advance(self, verdict: torch.Tensor | bool | None = None) -> None:
        """Begin the exchange, or wait for its pending collective and pass it the answer; after its verdict pass it
        `verdict`, the answer for the whole pass. Then issue its next Send."""
        answer = verdict if self._pending is None else self._pending.wait()
        self._pending, self.has_send_left = None, False
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
    """Run each exchange up to its verdict: one Send of each, in bucket order, until none is left."""
    has_send_left = True
    while has_send_left:
        has_send_left = False
        for each in running:
            if each.has_send_left:
                each.advance()
                has_send_left = True
    for each in running:
        each.finish()


@dataclass(eq=False)
class BackwardPass:
    """The buckets of one backward pass, in order. All ranks run the same sequence.

    Attributes:
        group: the process group.
        compressing: whether compression has begun.
        loss_scale: the loss scale of this pass.
        step: the step, as passed to the exchanges.
        step_at_most: the upper bound of its number.
        step_label: its number for messages: "7", or "<= 7" if the host has not read the outcomes of earlier passes.
        comparison: compares what the ranks send; None if there is nothing to compare.
    """

    group: dist.ProcessGroup
    compressing: bool
    loss_scale: LossScale
    step: StepInfo
    step_at_most: int
    step_label: str
    comparison: SendComparison | None = None
    running: list[RunningExchange] = field(default_factory=list)

    def add(self, exchange: RunningExchange) -> None:
        """Start the exchange of the next bucket, then advance each earlier one that has a Send left."""
        self.running.append(exchange)
        exchange.advance()
        for earlier in self.running[:-1]:
            if earlier.has_send_left:
                earlier.advance()

    def drain(self) -> torch.Tensor:
        """After the last bucket: run all remaining Sends and wait for them. Returns whether everything received is
        finite (0-dim bool tensor).

        Raises:
            HookRunError: on all ranks, if they do not send the same.
        """
        finish_sends(self.running)
        if self.comparison is not None:
            self.comparison.end()
        return torch.stack([each.finite for each in self.running]).all()

    def commit(self, good: torch.Tensor | bool) -> None:
        for each in self.running:
            each.advance(good)
        for each in self.running:
            each.finish()

    def fulfil(self) -> None:
        """Complete the futures that DDP waits for."""
        for each in self.running:
            each.future.set_result(each.result)
        # Release the buckets: DDP may rebuild them now.
        self.running.clear()

    def abandon(self) -> list[Pending]:
        """Close all exchanges after an exception, without a commit. Returns the collectives that may still write into a
        bucket."""
        writing = [pending for each in self.running if (pending := each.close()) is not None]
        self.running.clear()
        return writing
