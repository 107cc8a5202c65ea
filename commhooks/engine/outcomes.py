"""Which of the latest backward passes were committed. On an accelerator the outcome stays on the device, and the host
reads it only when it is needed."""

import threading

import torch

from commhooks.comm.counters import Counters
from commhooks.engine.state import LearnedState


class Outcomes:
    """Maintains `state.step` and the counters of committed steps.

    Attributes:
        lock: hold it while writing the learned state, and while reading it from another thread.
        committing: True while a commit writes: a save from a signal handler now would mix two steps.
    """

    def __init__(self, state: LearnedState, counters: Counters) -> None:
        self.lock = threading.RLock()
        self.committing = False
        self._state = state
        self._counters = counters
        # Passes whose outcome the host has not read: committed count (on the device), passes, compressed?
        self._unread: tuple[torch.Tensor, int, bool] | None = None

    @property
    def unread_passes(self) -> int:
        """Number of backward passes whose outcome the host has not read."""
        unread = self._unread  # another thread may read the outcome meanwhile
        return unread[1] if unread else 0

    @property
    def step_at_most(self) -> int:
        """`state.step`, if all passes whose outcome is unread were committed."""
        with self.lock:
            return self._state.step + self.unread_passes

    def add(self, good: torch.Tensor, compressed: bool) -> None:
        """Record one more pass, committed if `good` (0-dim bool tensor) is true."""
        count, passes = self._unread[:2] if self._unread else (torch.zeros((), dtype=torch.int64), 0)
        self._unread = (good + count, passes + 1, compressed)

    def read(self) -> None:
        """Bring `state.step` up to date. If the outcome of a pass is unread, the host waits for the current stream:
        call this within `CommitMark.reading`."""
        with self.lock:
            while (unread := self._unread) is not None:
                committed, loss_scale = int(unread[0].item()), float(self._state.loss_scale)
                # While this thread waited for the device, a signal handler may have read and counted the passes.
                if self._unread is unread:
                    self._count(committed, loss_scale, *unread[1:])

    def _count(self, committed: int, loss_scale: float, passes: int, compressed: bool) -> None:
        was, self.committing = self.committing, True
        try:
            self._unread = None
            self._state.step += committed
            self._state.nonfinite_steps += passes - committed
            self._state.loss_scale = loss_scale
            self._counters.compressed_steps += committed if compressed else 0
            self._counters.nonfinite_steps += passes - committed
        finally:
            self.committing = was
