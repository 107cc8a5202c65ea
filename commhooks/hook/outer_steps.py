"""The outer steps of a round: which part of the weights is exchanged when, at once or while the training goes on."""

import threading
import weakref
from collections.abc import Sequence

import torch

from commhooks.compressors.local_steps.schedule import turns
from commhooks.engine.session import ABANDONED_LIMIT_S, Session
from commhooks.gradients.weights import divided, packed, write_back


class OuterSteps:
    """All ranks call the methods after the same passes.

    Args:
        session: runs the exchanges. With `delay` they run in a thread, and so on a process group of their own.
        weights: of the model, in the same order on all ranks.
        sizes: numbers in the whole of each, of which `weights` may be shards.

    Attributes:
        immediate: all weights are exchanged together, and nothing happens in the meantime.
        discarded: how many outer steps have found weights that are not finite.
    """

    def __init__(self, session: Session, weights: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        config = session.compressor.config
        self.immediate = config.fragments == 1 and config.delay == 0
        self.discarded = 0
        self._session = session
        self._weights = weights
        self._fragments = divided(weights, sizes, config.fragments)
        self._turns = turns(config.sync_every, config.fragments, config.delay)
        self._next = 0  # the turn that is waited for
        self._on_its_way: _Exchange | None = None

    def due(self, passes: int) -> bool:
        """Whether there is something to do after so many passes of the round."""
        turn = self._turns[self._next]
        return passes >= (turn.sent_after if self._on_its_way is None else turn.due_after)

    def advance(self, passes: int) -> bool:
        """Do what is due after so many passes of the round. Returns whether the round has ended."""
        while self.due(passes):
            turn = self._turns[self._next]
            if self._on_its_way is None:
                later = turn.sent_after < turn.due_after
                self._on_its_way = _Exchange(self._session, self._fragments[turn.fragment], later=later)
            if passes >= turn.due_after:
                self._arrive()
                self._next += 1
            if self._next == len(self._turns):
                self._next = 0
                return True
        return False

    def end_round(self) -> None:
        """End the round early: let arrive what is on its way, then exchange all weights."""
        self._arrive()
        self._next = 0
        self._on_its_way = _Exchange(self._session, self._weights, later=False)
        self._arrive()

    def forget(self, *, patiently: bool = False) -> None:
        """Begin a round without what is on its way, of which nothing will come: another state is loaded, or the
        training has ended. `patiently`: wait for the other ranks until the process group gives them up."""
        exchange, self._on_its_way, self._next = self._on_its_way, None, 0
        if exchange is not None:
            exchange.abandon(None if patiently else ABANDONED_LIMIT_S)

    def _arrive(self) -> None:
        exchange, self._on_its_way = self._on_its_way, None
        if exchange is not None:
            exchange.wait()
            exchange.apply()
            self.discarded += exchange.discarded


class _Exchange:
    """One outer step of some weights. It begins here.

    Attributes:
        discarded: weights were not finite on some rank. Known after `wait`.
    """

    def __init__(self, session: Session, weights: Sequence[torch.Tensor], *, later: bool) -> None:
        self._session, self._weights = session, weights
        self._buckets = list(packed(weights))
        self._sent: list[torch.Tensor] = []
        self.discarded = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if later:
            self._sent = [bucket.flat.clone() for bucket in self._buckets]
            self._thread = threading.Thread(target=self._run, name="commhooks outer step", daemon=True)
            self._thread.start()
            # Also when the process ends: a thread that is stopped within a collective aborts it.
            weakref.finalize(self, _join, self._thread, ABANDONED_LIMIT_S)
        else:
            self._run()

    def _run(self) -> None:
        state = self._session.state
        discarded = state.nonfinite_steps
        try:
            with torch.no_grad():
                for future in [self._session.run(bucket) for bucket in self._buckets]:
                    future.wait()
                self._session.held.settle()
        except BaseException as error:  # it is the caller's
            self._error = error
        self.discarded = state.nonfinite_steps > discarded

    def wait(self) -> None:
        """Raises what the exchange raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self, limit_s: float | None) -> None:
        if self._thread is not None:
            _join(self._thread, limit_s)

    @torch.no_grad()
    def apply(self) -> None:
        """Let the weights be the new anchor, plus what the training has added to them in the meantime."""
        if self._sent and not self.discarded:
            for bucket, sent, now in zip(self._buckets, self._sent, packed(self._weights), strict=True):
                bucket.flat.sub_(sent).add_(now.flat)
        for bucket in self._buckets:
            write_back(bucket)


def _join(thread: threading.Thread, limit_s: float | None) -> None:
    if thread is not threading.current_thread():
        thread.join(limit_s)
