"""Who may read and write the learned state of a session, and which backward passes it contains.

On an accelerator the outcome of a pass stays on the device, and the host reads it only when it is needed.
"""

import contextlib
import threading
from collections.abc import Iterator

import torch

from commhooks.comm.counters import Counters
from commhooks.engine.state import LearnedState
from commhooks.engine.streams import CommitMark
from commhooks.gradients import precision
from commhooks.gradients.loss_scale import LossScale, chosen


class HeldState:
    """Maintains `state.step` and the counters of committed steps.

    Attributes:
        state: the learned state. It changes in `committing`, and by `overwrite`.
        lock: hold it while writing the learned state, and while reading it from another thread.
        in_commit: True while a commit writes: a save from a signal handler now would mix two steps.
        torn: the latest commit failed on this rank; not so after a load.
    """

    def __init__(self, state: LearnedState, counters: Counters) -> None:
        self.state = state
        self.lock = threading.RLock()
        self.in_commit = False
        self.torn = False
        self._counters = counters
        self._mark = CommitMark()
        # Passes whose outcome the host has not read: committed count (on the device), passes, compressed?
        self._unread: tuple[torch.Tensor, int, bool] | None = None

    def steps(self, start: int, *, exact: bool) -> tuple[int, int]:
        """The least and the largest number of steps that may have been committed: if none, or all, of the passes whose
        outcome is unread were. Synchronises with an accelerator only if `exact`, or if `start` lies in between."""
        with self.lock:  # another thread that saves may be updating `state.step` and the unread passes
            step, unread = self.state.step, self._unread
            passes = unread[1] if unread else 0
            if passes and (exact or step < start <= step + passes):
                self.settle()
                step, passes = self.state.step, 0
            return step, step + passes

    @contextlib.contextmanager
    def committing(self, device: torch.device) -> Iterator[None]:
        """Context manager: the body writes the gradients of a pass and the learned state."""
        with self.lock:
            self.in_commit = True
            try:
                yield
            except BaseException:
                # The tensors are a mix of this step and the one before: none of them may be saved.
                self.state.forget_local()
                self.state.local_missing = self.torn = True
                raise
            finally:
                if precision.has_streams(device):
                    self._mark.set(device)
                self.in_commit = False

    def add(self, verdict: torch.Tensor | bool, loss_scale: LossScale, *, compressed: bool) -> None:
        """Record, in the body of `committing`, a pass with this loss scale.

        Args:
            verdict: whether it is committed: a bool on the CPU, else a 0-dim bool tensor.
            compressed: whether it counts as a compressed one.
        """
        if verdict is not False:
            before = self.state.loss_scale
            self.state.loss_scale = loss_scale if verdict is True else chosen(verdict, loss_scale, before)
            # After a failed commit the residual started at zero; from this commit on it is valid again.
            self.state.local_missing = self.torn = False
        if isinstance(verdict, bool) and self._unread is None:
            self._count(int(verdict), float(self.state.loss_scale), 1, compressed)
            return
        count, passes = self._unread[:2] if self._unread else (torch.zeros((), dtype=torch.int64), 0)
        self._unread = (verdict + count, passes + 1, compressed)

    def settle(self) -> None:
        """Bring `state.step` up to date, for which the host may wait for the latest commit on an accelerator. The
        caller's current stream waits for that commit, too, and so reads the learned state as written by it."""
        with self.lock:
            self._mark.wait()
            with self._mark.reading():
                self._read()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Context manager: hold the lock of the learned state, with `state.step` up to date. The body may copy tensors
        of the state to the host; this waits for the latest commit, and for nothing that the hook or the caller has
        queued since. Change them by `overwrite` only."""
        with self.lock, self._mark.reading():
            self._read()
            yield

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write `value`, on the CPU, into `tensor` of the learned state. Use only within the body of `settled`."""
        self._mark.overwrite(tensor, value)

    def _read(self) -> None:
        while (unread := self._unread) is not None:
            committed, loss_scale = int(unread[0].item()), float(self.state.loss_scale)
            # While this thread waited for the device, a signal handler may have read and counted the passes.
            if self._unread is unread:
                self._count(committed, loss_scale, *unread[1:])

    def _count(self, committed: int, loss_scale: float, passes: int, compressed: bool) -> None:
        was, self.in_commit = self.in_commit, True
        try:
            self._unread = None
            self.state.step += committed
            self.state.nonfinite_steps += passes - committed
            self.state.loss_scale = loss_scale
            self._counters.compressed_steps += committed if compressed else 0
            self._counters.nonfinite_steps += passes - committed
        finally:
            self.in_commit = was
