"""A round ends with the first machine that has done all of its steps, which tells the others."""

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from commhooks.members.client import NETWORK_ERRORS, Client

_AGAIN_S = 1.0


class RoundEnd:
    """Tells other machines that this one has done its round, and knows whether one of them has.

    Rounds have numbers, equal on all machines of a round. News of a later round than the running
    one counts, too: this machine is behind. `hear` may be called from any thread, and so a machine
    learns in mid-step that its round is over, and looks between two steps.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._heard = self._telling = -1

    def hear(self, round: int) -> None:
        """Another machine has done its part of `round`."""
        self._heard = max(self._heard, round)

    def is_over(self, round: int) -> bool:
        """Return whether another machine has done its part of `round`."""
        return self._heard >= round

    def begin(self, round: int) -> None:
        """A round begins."""
        self._telling = -1
        if self._heard > round:
            self._heard = -1  # an older state was loaded, and the news is from before it

    def tell(self, servers: Collection[str], round: int) -> None:
        """Tell the machines at `servers` from a thread, until all know it or `round` is over."""
        self._telling = round
        threading.Thread(
            target=self._tell, args=(list(servers), round), name="commhooks round end", daemon=True
        ).start()

    def _tell(self, servers: list[str], round: int) -> None:
        again = threading.Event()
        with ThreadPoolExecutor(min(16, len(servers) or 1), "commhooks round end") as pool:
            while servers and self._telling == round:
                told = list(pool.map(lambda server: self._tell_one(server, round), servers))
                servers = [server for server, done in zip(servers, told, strict=True) if not done]
                if servers:
                    again.wait(_AGAIN_S)

    def _tell_one(self, server: str, round: int) -> bool:
        try:
            self._client.ask(server, f"ended/{round}")
        except NETWORK_ERRORS:
            return False
        return True
