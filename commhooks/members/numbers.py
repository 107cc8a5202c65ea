"""What this machine has done, in numbers: for `CommHook.stats`, for `commhooks machines`, and for
the time after which other machines are given up.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

_LEAST_LIMIT_S = 60.0
_ROUNDS = 3


class Numbers:
    """Counts the rounds of this machine. Any thread may read.

    Attributes:
        since: the time (Unix) at which this machine came.
        steps_per_s: backward passes per second in the latest round, with its outer step.
        weight: of this machine in the latest outer step, 0 to 1; None before.
        waited_s: seconds of waiting for other machines, since it came.
        round: returns the number of outer steps so far.
        passes: returns the number of backward passes so far.
        bytes_sent: returns the bytes sent so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.since = time.time()
        self.steps_per_s: float | None = None
        self.weight: float | None = None
        self.waited_s = 0.0
        self.round: Callable[[], int] = lambda: 0
        self.passes: Callable[[], int] = lambda: 0
        self.bytes_sent: Callable[[], int] = lambda: 0
        self._clock = clock
        self._longest_s = 0.0
        self._begun: tuple[float, float, int] | None = None  # the round: time, waited_s, passes

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the body as waiting."""
        began = self._clock()
        try:
            yield
        finally:
            self.waited_s += self._clock() - began

    def begin_round(self) -> None:
        """A round begins, and the one before has ended."""
        now, passes = self._clock(), self.passes()
        if self._begun is not None:
            began, waited_s, before = self._begun
            self.steps_per_s = (passes - before) / max(now - began, 1e-9)
            self._longest_s = max(self._longest_s, now - began - (self.waited_s - waited_s))
        self._begun = now, self.waited_s, passes

    @property
    def limit_s(self) -> float:
        """How long a machine may not answer or move: as long as three of the longest rounds so
        far, without their waiting, and at least a minute.
        """
        return max(_LEAST_LIMIT_S, _ROUNDS * self._longest_s)

    def stats(self) -> dict[str, Any]:
        """Return what `CommHook.stats` shows beside its own round and bytes."""
        return {
            "members_steps_per_s": self.steps_per_s,
            "members_weight": self.weight,
            "members_waited_s": self.waited_s,
            "members_since": self.since,
        }

    def shown(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        return {
            "round": self.round(),
            "steps_per_s": self.steps_per_s,
            "weight": self.weight,
            "waited_s": self.waited_s,
            "bytes_sent": self.bytes_sent(),
            "since": self.since,
        }
