"""The outer steps since a machine has begun to read the state of this one, so that it can catch up
while the others train on.
"""

import time
from collections.abc import Callable

from commhooks.local_steps.replay import Record

_LEAST_BYTES = 2**24


class History:
    """Keeps outer steps, as they were sent, while a machine reads, and no more bytes than the state
    has, or 16 MiB. Other threads may read.

    Attributes:
        round: the number of the running round.
    """

    def __init__(self, limit_s: Callable[[], float]) -> None:
        self.round = -1
        self._limit_s = limit_s
        self._steps: dict[int, bytes] = {}
        self._bytes_left = 0
        self._used_at = float("-inf")

    @property
    def is_kept(self) -> bool:
        """Whether a machine reads; none does if it has not for `limit_s()`."""
        return self._bytes_left > 0 and time.monotonic() < self._used_at + self._limit_s()

    def begin(self, most_bytes: int) -> None:
        """A machine will read the state of the running round."""
        if not self.is_kept:
            self._steps = {}
            self._bytes_left = max(most_bytes, _LEAST_BYTES)
        self.use()

    def use(self) -> None:
        """A machine has read something."""
        self._used_at = time.monotonic()

    def add(self, record: Record) -> None:
        """The running round has ended with this outer step."""
        content = record.to_bytes()
        self._bytes_left -= len(content)
        if self._bytes_left > 0:
            self._steps[self.round] = content
        else:
            self._steps = {}

    def end(self) -> None:
        """The outer steps so far do not lead to the state of this machine."""
        self._bytes_left = 0
        self._steps = {}

    def step(self, round: int) -> bytes | None:
        """Return the outer step of a round; b"" if the round is running; None if it is not kept."""
        if self.is_kept and round == self.round:
            self.use()
            return b""
        content = self._steps.get(round) if self.is_kept else None
        if content is not None:
            self.use()
        return content
