"""The order in which the exchanges of all buckets run in one backward pass.

Collectives are issued only from inside hook calls, in bucket order, so that every rank issues the same sequence. A new
bucket starts its exchange; then each earlier one with a round left takes one step: with two rounds, P of bucket k, then
Q of bucket k - 1. The last bucket runs all remaining rounds. The call for bucket k returns while its collective is in
flight. What is held back to go out with messages of other buckets (`coalescing.py`) is waited for after the last one.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commhooks.comm.collective import Pending, Send, new_future
from commhooks.compressors.base import Verdict
from commhooks.engine.coalescing import Coalescing, Held
from commhooks.engine.task import Done, ExchangeTask
from commhooks.gradients.loss_scale import LossScale

Issue = Callable[[Send], Pending | Held]


class RunningExchange:
    """The exchange of one bucket, with its pending collective.

    Args:
        task: the exchange, not begun yet.
        flat: the bucket's buffer.
        issue: starts a collective for this bucket.
    """

    def __init__(self, task: ExchangeTask, flat: torch.Tensor, issue: Issue) -> None:
        self.flat = flat
        self.result = flat
        """Holds the averaged gradient after the commit: the bucket, unless the exchange returns another tensor."""
        self.future = new_future(flat.device)
        self._task = task
        self._issue = issue
        self._pending: Pending | Held | None = None
        self._last_sent = False
        self._finite: torch.Tensor | None = None

    def start(self) -> None:
        """Run the exchange up to its first collective and issue that."""
        self._resume(None)

    @property
    def has_round_left(self) -> bool:
        """A collective is pending, and the exchange will issue another one after it."""
        return self._pending is not None and not self._last_sent

    @property
    def is_held(self) -> bool:
        """The pending collective waits for those of other buckets."""
        return isinstance(self._pending, Held)

    def step(self) -> None:
        """Wait for the pending collective, then run up to the next one or to the verdict."""
        assert self._pending is not None
        answer = self._pending.wait()
        self._pending = None
        self._resume(answer)

    def finite(self) -> torch.Tensor:
        """Run up to the verdict. Returns whether everything received is finite (0-dim bool tensor)."""
        while self._pending is not None:
            self.step()
        assert self._finite is not None
        return self._finite

    def commit(self, good: torch.Tensor | bool) -> None:
        """Pass the verdict on the whole pass to the exchange, and run it to its end, or to what the ranks of a node
        send each other then."""
        self._resume(good)

    def finish(self) -> None:
        """Run the exchange to its end."""
        while self._pending is not None:
            self.step()

    def close(self) -> Pending | None:
        """Close the exchange of an abandoned pass. Its exceptions are suppressed: they would hide the error that ended
        the pass. Returns the pending collective if that may still write into the bucket."""
        with contextlib.suppress(Exception):
            self._task.exchange.close()
        pending, self._pending = self._pending, None
        return None if pending is None or isinstance(pending, Held) or not pending.writes(self.flat) else pending

    def _resume(self, answer: torch.Tensor | bool | None) -> None:
        step = self._task.advance(answer)
        if isinstance(step, Done):
            self.result = step.result
        elif isinstance(step, Verdict):
            self._finite = step.finite
        else:
            self._pending, self._last_sent = self._issue(step), step.last
            if step.meanwhile is not None:
                step.meanwhile()


@dataclass(eq=False)
class BackwardPass:
    """The buckets of one backward pass, in order. All ranks run the same sequence.

    Attributes:
        group: the process group.
        compressing: whether compression has begun.
        residual_factor: `loss_scale` / the one with which fields with `scales_with_loss` were written.
        loss_scale: the loss scale of this pass.
        step: committed passes before this one; on an accelerator a lower bound.
        step_at_most: the upper bound.
        coalescing: holds small messages back; None: each is sent at once.
    """

    group: dist.ProcessGroup
    compressing: bool
    residual_factor: LossScale
    loss_scale: LossScale
    step: int
    step_at_most: int
    coalescing: Coalescing | None = None
    running: list[RunningExchange] = field(default_factory=list)

    @property
    def step_label(self) -> str:
        """The step for messages: "7", or "<= 7" if the host has not read the outcomes of earlier passes."""
        return f"{'' if self.step == self.step_at_most else '<= '}{self.step_at_most}"

    def add(self, exchange: RunningExchange) -> None:
        """Start the exchange of the next bucket, then advance each earlier one with a round left by one step."""
        self.running.append(exchange)
        exchange.start()
        for earlier in self.running[:-1]:
            if earlier.has_round_left and not earlier.is_held:
                earlier.step()

    def drain(self) -> torch.Tensor:
        """After the last bucket: run all remaining rounds and wait for them. Returns whether everything received is
        finite (0-dim bool tensor)."""
        while any(each.has_round_left for each in self.running):
            for each in self.running:
                if each.has_round_left:
                    each.step()
        return torch.stack([each.finite() for each in self.running]).all()

    def commit(self, good: torch.Tensor | bool) -> None:
        for each in self.running:
            each.commit(good)
        for each in self.running:
            each.finish()

    def fulfil(self) -> None:
        """Complete the futures that DDP waits for."""
        for each in self.running:
            each.future.set_result(each.result)
        # Release the buckets: DDP may rebuild them now.
        self.running.clear()

    def abandon(self) -> list[Pending]:
        """Close all exchanges after an exception: nothing of this pass is committed. Returns the collectives that may
        still write into a bucket."""
        writing = [pending for each in self.running if (pending := each.close()) is not None]
        self.running.clear()
        return writing
