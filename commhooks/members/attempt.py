"""One exchange among machines, from the connections to the commit: steps 1 to 3 of the proof in
`report.py`.
"""

import torch

from commhooks.comm.collectives import gather_bytes
from commhooks.errors import HookConfigError
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.exchange import OuterExchange
from commhooks.local_steps.fragments import OuterSteps
from commhooks.local_steps.replay import Recorder
from commhooks.members.registered import Registered
from commhooks.members.report import Decision, Report, furthest, share_of
from commhooks.members.this_machine import ThisMachine

_ERRORS = (RuntimeError, ValueError, OSError)
"""Raised when a connection is lost. torch 2.13 raises ValueError if it cannot name the group of a
failed collective, because torch.distributed does not know it.
"""
_WHAT = "the progress of the machine that has done most"


class Attempt:
    """An exchange, until it is known whether all machines commit it. All ranks of the machine must
    call each method together.

    Attributes:
        decision: of the quorum that has led to it.
        prepared: what has arrived; None if something is missing.
        explained: whether this machine knows with whom it could not connect, after a failure.
    """

    def __init__(
        self,
        decision: Decision,
        own: Report,
        machine: ThisMachine,
        source: GradientSource,
        registered: Registered,
    ) -> None:
        self.decision = decision
        self.prepared: OuterExchange | None = None
        self.explained = False
        self._own, self._machine = own, machine
        self._source, self._registered = source, registered
        self._furthest = furthest(decision.machines)
        self._progress = b""
        self._recorder: Recorder | None = None

    def run(self, outer: OuterSteps, common: CommonState, limit_s: float) -> str:
        """Exchange the differences, and confirm. Returns a text about what failed; "" if all
        machines can commit. It is a text, because an exception would keep the connections open, and
        the others wait until they are closed.
        """
        ranks, connections = self._machine.ranks, self._machine.connections
        failure, unreachable = "", tuple[str, ...]()
        # an error may occur on one rank of the machine only: no collective inside the machine
        # before they agree
        try:
            self._arrive(outer, common, limit_s)
        except _ERRORS as error:
            failure, unreachable = _not_ours(error), getattr(error, "unreachable", ())
        arrived = confirmed = ranks.all_agree(not failure)
        if not arrived:
            self.prepared = None
        else:
            try:
                if ranks.exchanges:
                    connections.confirm()
            except _ERRORS as error:
                failure = _not_ours(error)
            confirmed = ranks.all_agree(not failure)
        if not confirmed and ranks.exchanges:
            connections.give_up(self.decision.name)
            self.explained = not connections.all_answer(self.decision.machines, unreachable)
        return "" if confirmed else failure or "another rank of this machine has failed"

    def _arrive(self, outer: OuterSteps, common: CommonState, limit_s: float) -> None:
        """Connect, and exchange all differences. Anchor, momentum and trained weights are not
        written; what is not trained becomes the first machine's, which a repeated exchange does
        again.
        """
        machines, connections = self.decision.machines, self._machine.connections
        exchanges = self._machine.ranks.exchanges
        share = share_of(self._own, machines)
        self._machine.numbers.weight = share / len(machines)
        if exchanges and not self.decision.reuse:
            connections.connect(machines, self.decision.name, limit_s)
        if exchanges and self._machine.history.is_kept:
            self._recorder = Recorder()
        prepared = outer.prepare(share, exchanges=exchanges, recorder=self._recorder)
        prepared.begin()
        prepared.finite()
        if exchanges:
            assert connections.group is not None
            common.share(optimizers=False, group=connections.group)
            if self._furthest is not None:
                content = self._registered.progress() if self._is_furthest else b""
                place = machines.index(self._furthest)
                device = self._source.device
                self._progress = gather_bytes(content, connections.group, device, _WHAT)[place]
        self.prepared = prepared

    @property
    def _is_furthest(self) -> bool:
        return self._furthest is not None and self._own.id == self._furthest.id

    def commit(self, outer: OuterSteps) -> None:
        """Write what has arrived, and go on from where the machine stands that has done most."""
        assert self.prepared is not None
        outer.commit_prepared(self.prepared)
        if self._recorder is not None:
            self._machine.history.add(self._recorder.record(len(self.decision.machines)))
        if self._furthest is None or self._own.steps == self._furthest.steps:
            return
        group = self._source.group
        if group.size() > 1:
            self._progress = gather_bytes(self._progress, group, self._source.device, _WHAT)[0]
        self._registered.take_progress(self._progress)


def _not_ours(error: Exception) -> str:
    """Return the text of `error`, or raise it if another attempt would not help."""
    if isinstance(error, (torch.OutOfMemoryError, HookConfigError)):
        raise error
    return str(error) or type(error).__name__
