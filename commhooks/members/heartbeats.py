"""Heartbeats to the lighthouse, which native threads send, whatever holds the GIL."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from commhooks.members.lines import Lines

HEARTBEAT_S = 0.25
CONNECT_LIMIT_S = 5.0
_LOOK_EVERY_S = 0.5


class Heartbeats:
    """Sends heartbeats until `stop`, or until the process ends. A thread decides when they pause;
    if it cannot run, because something holds the GIL, they go on.

    They pause if another machine waits for this one, whose training has not moved for `limit_s()`
    (`waited_for`). Before the first request they pause while other machines train, which then do
    not wait for this one, and after `limit_s()`. They go on with the next request
    (`asking(True)`).

    Args:
        limit_s: returns seconds.
        new_sender: returns what sends heartbeats until its `shutdown()`, such as torchft's
            `ManagerServer`.
        others_train: returns whether other machines train already.

    Attributes:
        passes: returns the number of backward passes so far.
        orphaned: whether the torchrun that has started this process is gone.
    """

    def __init__(
        self,
        limit_s: Callable[[], float],
        new_sender: Callable[[], Any],
        others_train: Callable[[], bool],
        lines: Lines,
    ) -> None:
        self.passes: Callable[[], int] = lambda: 0
        self.orphaned = False
        self._limit_s = limit_s
        self._new_sender = new_sender
        self._others_train = others_train
        self._lines = lines
        self._moved_at = time.monotonic()
        self._asking = False
        self._has_asked = False
        self._paused = False
        self._again = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commhooks heartbeat", daemon=True)
        self._thread.start()
        # The process would abort if a thread came back from native code while the interpreter ends.
        weakref.finalize(self, _stop, self._stopped, self._thread)

    def _run(self) -> None:
        sender: Any = None
        passes = self.passes()
        parent = os.getppid()
        started_by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        while not self._stopped.wait(_LOOK_EVERY_S):
            if self.passes() != passes or self._asking:
                passes = self.passes()
                self._moved_at = time.monotonic()
            self.orphaned = started_by_torchrun and os.getppid() != parent
            if sender is not None and (self._again or not self._beats()):
                sender.shutdown()
                sender = None
            if sender is None and self._beats():
                self._again = False
                try:
                    sender = self._new_sender()
                except Exception:  # torchft raises RuntimeError: the lighthouse is gone
                    continue
        if sender is not None:
            sender.shutdown()

    def _beats(self) -> bool:
        if self._paused or self.orphaned:
            return False
        return self._has_asked or not (self._stands_still() or self._others_train())

    def _stands_still(self) -> bool:
        return not self._asking and time.monotonic() > self._moved_at + self._limit_s()

    def asking(self, now: bool) -> None:
        """Must be called when this machine begins to wait for a quorum, and when it has ended."""
        self._asking = now
        self._has_asked = True
        self._moved_at = time.monotonic()
        self._paused = False

    def waited_for(self) -> None:
        """Another machine has waited for this one for too long."""
        if self._stands_still() and not self._paused:
            self._paused = True
            self._lines.say(
                "the others go on without this machine, whose training has not moved for %.0f s",
                time.monotonic() - self._moved_at,
            )

    def pause(self) -> None:
        """Send none until the next request."""
        self._paused = True

    def begin_again(self) -> None:
        """Send heartbeats with a new sender from now on."""
        self._again = True

    def stop(self) -> None:
        self._stopped.set()


def _stop(stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(CONNECT_LIMIT_S + 1)
