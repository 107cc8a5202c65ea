"""Catch up with a machine whose state this one has taken: take the outer steps that it has taken
since.
"""

import time

from commhooks.comm.collectives import gather_bytes
from commhooks.errors import HookRunError
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.local_steps.replay import Record
from commhooks.members.client import NETWORK_ERRORS
from commhooks.members.report import Report
from commhooks.members.this_machine import ThisMachine

_WHAT = "an outer step of another machine"
_AGAIN_S = 0.05
_FEW = 4
"""So many outer steps are no reason to give up."""


class CatchUp:
    """Takes outer steps, until none is missing. All ranks of the machine must call `run`."""

    def __init__(self, machine: ThisMachine, source: GradientSource, outer: OuterSteps) -> None:
        self._ranks, self._lines = machine.ranks, machine.lines
        self._name = machine.id.rpartition(":")[0]
        self._group, self._device = source.group, source.device
        self._outer = outer
        self._client = machine.client
        self._began = time.monotonic()
        self._bytes = 0

    @property
    def _round(self) -> int:
        return self._outer.state.step + self._outer.state.nonfinite_steps

    def run(self, source: Report, limit_s: float) -> bool:
        """Take the outer steps of `source`. Return whether this machine now has all. Raises
        HookRunError if the others take outer steps faster than this machine reads them.
        """
        server = source.servers[self._ranks.shard]
        first, behind = self._round, self._behind(server)
        while True:
            content, failure = b"", ""
            try:
                if self._ranks.exchanges:
                    content = self._client.outer_step(server, self._round, limit_s)
            except NETWORK_ERRORS as error:
                failure = str(error) or type(error).__name__
            if not self._ranks.all_agree(not failure):
                self._lines.say("the outer steps of %s are unavailable: %s", source.name, failure)
                return False
            if not self._ranks.first_text("more" if content and self._ranks.is_first else ""):
                break
            self._take(content or self._wait_for_step(server, limit_s))
            done = self._round - first
            if done >= max(_FEW, behind) and (now := self._behind(server)) >= max(_FEW, behind):
                raise HookRunError(self._too_slow(source, done, now + done - behind))
        with self._outer.held.settled():
            self._outer.state.drop_local()
        return True

    def _behind(self, server: str) -> int:
        """Return how many outer steps are missing, the same on all ranks of this machine."""
        text = ""
        if self._ranks.is_first:
            try:
                text = str(max(0, self._client.running_round(server) - self._round))
            except NETWORK_ERRORS:
                text = "0"  # which the next request finds
        return int(self._ranks.first_text(text))

    def _wait_for_step(self, server: str, limit_s: float) -> bytes:
        """Return the outer step that the first shard has read already."""
        content = b""
        deadline = time.monotonic() + limit_s
        while self._ranks.exchanges and not content and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)
            content = self._client.outer_step(server, self._round, limit_s)
        return content

    def _take(self, content: bytes) -> None:
        self._bytes += len(content)
        if self._group.size() > 1:
            content = gather_bytes(content, self._group, self._device, _WHAT)[0]
        self._outer.replay(Record.read(content))

    def _too_slow(self, source: Report, done: int, made: int) -> str:
        rate = self._bytes / 1e6 / (time.monotonic() - self._began)
        return (
            f"members: {self._name} falls behind: it has read outer steps of {source.name} at"
            f" {rate:.3g} MB/s, and the others make them at {rate * made / done:.3g} MB/s. Use a"
            " faster connection, a larger sync_every, or wire='int4'"
        )
