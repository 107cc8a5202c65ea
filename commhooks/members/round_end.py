"""A round ends with the first machine that has done all of its steps, which tells the others."""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from commhooks.members.client import NETWORK_ERRORS, Client

_AGAIN_S = 1.0
_PATIENCE_S = 0.02
"""In which machines of equal speed come by themselves, and nobody need be told."""


class RoundEnd:
    """Tells other machines that this one has done its round, and knows whether one of them has.

    Rounds have numbers, equal on all machines of a round, odd if an exchange is in flight. News of
    a later round than the running one counts, too: this machine is behind. `hear` may be called
    from any thread, and so a machine learns in mid-step that its round is over, and looks between
    two steps.

    A slow machine that hears it just after it has begun a step makes the others wait for almost the
    whole step. So if another machine has ended its latest round of this kind, it expects the end
    after the same time again, and rather waits for it than begins such a step.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._heard = self._telling = -1
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._heard_at = self._began = self._looked_at = clock()
        self._lasted_s: dict[int, float] = {}  # of the latest round of each kind, if it was ended
        self._expected_s: float | None = None  # how long the running round lasts

    def hear(self, round: int) -> None:
        """Another machine has done its part of `round`."""
        if round > self._heard:
            self._heard, self._heard_at = round, self._clock()
            self._news.set()

    def is_over(self, round: int) -> bool:
        """Return whether another machine has done its part of `round`."""
        return self._heard >= round

    def begin(self, round: int) -> None:
        """A round begins."""
        self._telling = -1
        if self._heard > round:
            self._heard = -1  # an older state was loaded, and the news is from before it
        self._news.clear()
        self._began = self._looked_at = self._clock()
        self._expected_s = self._lasted_s.pop(round % 2, None)

    def ends_here(self, round: int, weight: float | None) -> bool:
        """Return whether another machine has done its part of `round`, in which this one is between
        two steps. May wait for it, once in a round and no longer than this machine's latest step.
        `weight`: of this machine in the mean, 0 to 1; None: not known, and it does not wait.
        """
        step_s = self._clock() - self._looked_at
        if not self.is_over(round) and self._waits(step_s, weight):
            self._expected_s = None
            self._news.wait(step_s)
        self._looked_at = self._clock()
        if self.is_over(round):
            self._lasted_s[round % 2] = self._heard_at - self._began
        return self.is_over(round)

    def _waits(self, step_s: float, weight: float | None) -> bool:
        """Return whether to wait for the end loses less work than another step, which ends after
        it: this machine loses the seconds that are left, and the others the rest of the step.
        """
        if self._expected_s is None or weight is None:
            return False
        left_s = self._began + self._expected_s - self._clock()
        return weight * left_s < (1 - weight) * (step_s - left_s)

    def close(self) -> None:
        """Tell nobody any more."""
        self._stopped.set()

    def tell(self, servers: Collection[str], round: int) -> None:
        """Tell the machines at `servers` from a thread, until all know it or `round` is over."""
        self._telling = round
        threading.Thread(
            target=self._tell, args=(list(servers), round), name="commhooks round end", daemon=True
        ).start()

    def _tell(self, servers: list[str], round: int) -> None:
        self._stopped.wait(_PATIENCE_S)
        with ThreadPoolExecutor(min(16, len(servers) or 1), "commhooks round end") as pool:
            while servers and self._telling == round and not self._stopped.is_set():
                told = list(pool.map(lambda server: self._tell_one(server, round), servers))
                servers = [server for server, done in zip(servers, told, strict=True) if not done]
                if servers:
                    self._stopped.wait(_AGAIN_S)

    def _tell_one(self, server: str, round: int) -> bool:
        try:
            self._client.ask(server, f"ended/{round}")
        except NETWORK_ERRORS:
            return False
        return True
