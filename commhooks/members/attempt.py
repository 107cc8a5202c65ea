"""One exchange among machines, from the connections to the commit: steps 1 to 3 of the proof in
`report.py`.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from commhooks.comm.collectives import gather_bytes
from commhooks.errors import HookConfigError
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.exchange import OuterExchange
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.local_steps.replay import Recorder
from commhooks.members.peers import NotConnected
from commhooks.members.registered import Registered
from commhooks.members.report import Decision, Report, furthest, share_of
from commhooks.members.this_machine import ThisMachine

_ERRORS = (RuntimeError, ValueError, OSError)
"""Raised when a connection is lost. torch 2.13 raises ValueError if it cannot name the group of a
failed collective, because torch.distributed does not know it.
"""
_LOOK_EVERY_S = 1.0
_MOST_SILENT = 2
"""Looks in turn in which a machine does not answer: one may be starved."""
_WHAT = "the progress of the machine that has done most"


class Attempt:
    """An exchange, until it is known whether all machines commit it. All ranks of the machine must
    call each method together.

    Args:
        turn: the fragment whose turn it is.
        trained: passes of this machine when it begins.
        again: an exchange behind the training that has failed, whose differences are sent again.

    Attributes:
        decision: of the quorum that has led to it.
        fragment: that is exchanged; None: all weights.
        began: passes of this machine when it begins.
        trained: passes of this machine that are in its differences, and those before.
        steps: passes that its differences contain.
        in_flight: whether it runs behind the training.
        complete: whether everything has arrived on all ranks of this machine.
        sent: the weights of this rank as they were sent, if the training goes on meanwhile.
        explained: whether this machine knows with whom it could not connect, after a failure.
    """

    def __init__(
        self,
        decision: Decision,
        own: Report,
        machine: ThisMachine,
        source: GradientSource,
        registered: Registered,
        turn: int,
        trained: int,
        again: "Attempt | None" = None,
    ) -> None:
        self.decision = decision
        self.fragment = None if decision.whole else turn
        self.began = trained
        self.trained: int = trained if again is None else again.trained
        self.steps = own.steps
        self.sent: Sequence[torch.Tensor] = () if again is None else again.sent
        self.in_flight = False
        self.complete = False
        self.explained = False
        self._own, self._machine = own, machine
        self._source, self._registered = source, registered
        self._furthest = furthest(decision.machines)
        self._progress = b""
        self._exchange: OuterExchange | None = None
        self._recorder: Recorder | None = None

    def run(self, outer: OuterSteps, common: CommonState, limit_s: float) -> str:
        """Exchange the differences, and confirm; or begin to exchange them behind the training.
        Returns a text about what failed; "" if all machines can commit, or it has begun. It is a
        text, because an exception would keep the connections open, and the others wait until they
        are closed.
        """
        at_once, server = self.decision.at_once, self._machine.server
        with server.pausing() if at_once and server is not None else contextlib.nullcontext():
            failure = self._agreed(lambda: self._begin(outer, common, limit_s))
            if not failure and at_once:
                self.complete = True
                failure = self._agreed(self._confirm)
        if not failure and not at_once:
            self.in_flight = True
            self._follow_furthest()
        return failure

    def arrive(self, deadline: float | None) -> str:
        """Wait until what is in flight has arrived, or `deadline` has passed. Returns a text about
        what failed.
        """
        self.in_flight = False
        failure = self._agreed(lambda: self._wait(deadline))
        self.complete = not failure
        return failure

    def _wait(self, deadline: float | None) -> None:
        """Wait for what is in flight, for as long as all machines answer: gloo would wait for one
        that hangs until its limit, and cannot be interrupted; its thread then stays behind.
        """
        exchange, connections = self._exchange, self._machine.connections
        assert exchange is not None
        silent = 0
        while not exchange.has_arrived(_LOOK_EVERY_S):
            if deadline is not None and time.monotonic() > deadline:
                raise OSError("it did not arrive in time")
            try:
                connections.check(self.decision.machines, self.decision.name)
                silent = 0
            except NotConnected:
                silent += 1
                if silent == _MOST_SILENT:
                    raise
        exchange.finite()

    def _agreed(self, step: Callable[[], object]) -> str:
        """Do a step of the exchange. Returns a text if it has failed on a rank of this machine; the
        connections are then closed.
        """
        ranks, connections = self._machine.ranks, self._machine.connections
        failure, unreachable = "", tuple[str, ...]()
        # an error may occur on one rank of the machine only: no collective inside the machine
        # before they agree
        try:
            step()
        except _ERRORS as error:
            failure, unreachable = _not_ours(error), getattr(error, "unreachable", ())
        if ranks.all_agree(not failure):
            return ""
        if not self.complete:
            self._exchange = None
        if ranks.exchanges:
            connections.give_up(self.decision.name)
            self.explained = not connections.all_answer(self.decision.machines, unreachable)
        return failure or "another rank of this machine has failed"

    def _begin(self, outer: OuterSteps, common: CommonState, limit_s: float) -> None:
        """Connect, and send all differences. Anchor, momentum and trained weights are not
        written; what is not trained becomes the first machine's, which a repeated exchange does
        again.
        """
        machines, connections = self.decision.machines, self._machine.connections
        exchanges = self._machine.ranks.exchanges
        share = share_of(self._own, machines)
        self._machine.numbers.weight = share / len(machines)
        if exchanges and not self.decision.reuse:
            connections.connect(machines, self.decision.name, limit_s)
        if exchanges:
            connections.limit(limit_s)
        if exchanges and self._machine.history.is_kept:
            self._recorder = Recorder()
        self._exchange = exchange = outer.prepare(
            self.fragment, share, exchanges=exchanges, recorder=self._recorder, sent=self.sent
        )
        if self.decision.at_once:
            exchange.begin()
            exchange.finite()
        if exchanges:
            self._share(common)
        if not self.decision.at_once:
            exchange.begin_behind(outer.held.settle)
            self.sent = exchange.sent

    def _confirm(self) -> None:
        if self._machine.ranks.exchanges:
            self._machine.connections.confirm()

    def _share(self, common: CommonState) -> None:
        connections, device = self._machine.connections, self._source.device
        assert connections.group is not None
        common.share(optimizers=False, group=connections.group)
        if self._furthest is not None:
            content = self._registered.progress() if self._own.id == self._furthest.id else b""
            place = self.decision.machines.index(self._furthest)
            self._progress = gather_bytes(content, connections.group, device, _WHAT)[place]

    def commit(self, outer: OuterSteps) -> None:
        """Write what has arrived."""
        assert self._exchange is not None
        outer.commit_prepared(self._exchange)
        if self._recorder is not None:
            replicas = len(self.decision.machines)
            self._machine.history.add(self._recorder.record(replicas, self.fragment))
        if self.decision.at_once:
            self._follow_furthest()

    def _follow_furthest(self) -> None:
        """Go on from where the machine stands that has done most."""
        if self._furthest is None or self._own.done == self._furthest.done:
            return
        group = self._source.group
        if group.size() > 1:
            self._progress = gather_bytes(self._progress, group, self._source.device, _WHAT)[0]
        self._registered.take_progress(self._progress)

    def drop(self, limit_s: float) -> None:
        """Close the connections, and wait for what is in flight, which may write into its
        buffers.
        """
        if self._machine.ranks.exchanges:
            self._machine.connections.give_up(self.decision.name)
        if self._exchange is not None:
            self._exchange.wait(limit_s)


def _not_ours(error: Exception) -> str:
    """Return the text of `error`, or raise it if another attempt would not help."""
    if isinstance(error, (torch.OutOfMemoryError, HookConfigError)):
        raise error
    return str(error) or type(error).__name__
