"""The order of things in a backward pass: which exchange when, over all buckets.

Collectives are issued from inside the hook call only, in bucket order, so that every rank issues the same sequence. A
new bucket starts its exchange; then each earlier one that has a round left takes one step: with two rounds, P of bucket
k, then Q of bucket k - 1. At the last bucket what is left is driven to its end. The call for bucket k returns while
what it has sent travels.
"""

from collections.abc import Callable

import torch

from commhooks.comm.collective import Pending, Send, new_future
from commhooks.compressors.base import Exchange
from commhooks.errors import HookRunError
from commhooks.gradients.loss_scale import LossScale

Issue = Callable[[Send], Pending]


class RunningExchange:
    """One bucket on its way: an exchange, and what it waits for.

    Args:
        exchange: not started yet.
        flat: the bucket's buffer.
        issue: starts a collective for this bucket.
    """

    def __init__(self, exchange: Exchange, flat: torch.Tensor, issue: Issue) -> None:
        self.flat = flat
        self.future = new_future(flat.device)
        self._exchange = exchange
        self._issue = issue
        self._pending: Pending | None = None
        self._last_sent = False
        self._finite: torch.Tensor | None = None

    def start(self) -> None:
        """Run up to the first collective, and issue it."""
        self._resume(None)

    @property
    def has_round_left(self) -> bool:
        """It has sent something, and will send more when it has the answer."""
        return self._pending is not None and not self._last_sent

    def step(self) -> None:
        """Wait for what was sent last, and run on."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._resume(pending.wait())

    def finite(self) -> torch.Tensor:
        """Run to the verdict; whether all that arrived is finite (0-dim bool)."""
        while self._pending is not None:
            self.step()
        assert self._finite is not None
        return self._finite

    def commit(self, good: torch.Tensor | bool) -> None:
        """Give the verdict on the whole pass, and run to the end."""
        try:
            self._exchange.send(good)
        except StopIteration:
            return
        raise HookRunError("an exchange goes on after the verdict: it must yield one Verdict, and nothing after it")

    def close(self) -> None:
        """The pass was abandoned."""
        self._exchange.close()

    def _resume(self, answer: torch.Tensor | None) -> None:
        try:
            yielded = self._exchange.send(answer)
        except StopIteration:
            raise HookRunError(
                "an exchange ended before its verdict: it must yield Verdict(finite) once, before it writes its state"
            ) from None
        if isinstance(yielded, Send):
            self._pending, self._last_sent = self._issue(yielded), yielded.last
        else:
            self._finite = yielded.finite


class BackwardPass:
    """The buckets of one backward pass, in order. All ranks do the same in the same order.

    Attributes:
        compressing: whether compression has begun.
        loss_scale: of this pass.
        residual_factor: by this it has changed since state that scales with it was written.
        step: committed passes before this one; on an accelerator a lower bound.
        last_index: of the bucket that came last.
        done: committed, or found not to be finite.
    """

    def __init__(self, compressing: bool, residual_factor: LossScale, loss_scale: LossScale, step: int) -> None:
        self.compressing = compressing
        self.residual_factor = residual_factor
        self.loss_scale = loss_scale
        self.step = step
        self.last_index = -1
        self.done = False
        self.running: list[RunningExchange] = []

    def add(self, exchange: RunningExchange) -> None:
        """Start the exchange of the next bucket, then let the earlier ones take a step."""
        self.running.append(exchange)
        exchange.start()
        for earlier in self.running[:-1]:
            if earlier.has_round_left:
                earlier.step()

    def drain(self) -> torch.Tensor:
        """After the last bucket: send what is left, wait for everything; whether all of it is finite (0-dim bool)."""
        while any(each.has_round_left for each in self.running):
            for each in self.running:
                if each.has_round_left:
                    each.step()
        return torch.stack([each.finite() for each in self.running]).all()

    def commit(self, good: torch.Tensor | bool) -> None:
        for each in self.running:
            each.commit(good)

    def fulfil(self) -> None:
        """Tell DDP that the gradients are there."""
        self.done = True
        for each in self.running:
            each.future.set_result(each.flat)
        # DDP may be about to rebuild its buckets: nothing here keeps the old ones alive.
        self.running.clear()

    def abandon(self) -> None:
        """The pass ended in an exception: nothing of it is committed."""
        for each in self.running:
            each.close()
        self.running.clear()
