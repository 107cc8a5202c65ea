"""Outer steps among machines that come and go: ask for a quorum, decide (`report.py`), do it."""

import dataclasses
import enum
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from commhooks.comm.nodes import Nodes
from commhooks.errors import AttachError, HookRunError
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM
from commhooks.local_steps.outer_steps import OuterSteps
from commhooks.local_steps.partner import Due
from commhooks.local_steps.schedule import Applied, Exchanged, Sent
from commhooks.members.attempts import Attempts
from commhooks.members.heal import Healing
from commhooks.members.quorum import Quorums
from commhooks.members.report import Decision, QuorumAction, Report, effective_number
from commhooks.members.this_machine import ThisMachine

_MOST_FAILURES = 5
_LOOKS = 16
"""How often in a round the ranks of a machine agree whether another machine has done its round."""


class _Result(enum.Enum):
    """How a meeting of the machines ends for this one."""

    SAME_ROUND = "no machine had trained, and the running round goes on"
    NEW_ROUND = "a round begins"
    IN_FLIGHT = "an exchange is in flight"


class MachinePartner:
    """Implements `Partner` for machines that come and go. The ranks of a machine average gradients.

    Attributes:
        participants: the machines that train the running round, sorted by name.
        healing: serves and takes states.
        attempts: the exchanges of this machine.
    """

    description = "among machines that come and go"
    nodes: Nodes | None = None
    first_rank_exchanges = True
    only_whole_rounds = "machines meet only at the ends of rounds"
    _outer: OuterSteps
    _common: CommonState

    def __init__(
        self, machine: ThisMachine, source: GradientSource, signature: Mapping[str, str]
    ) -> None:
        self.participants: tuple[Report, ...] = ()
        self.healing = Healing(machine, source)
        self.attempts = Attempts(machine, source, self.healing.registered)
        self.options = machine.options
        self.name = machine.id.rpartition(":")[0]
        self.logs = machine.ranks.is_first
        self._machine, self._source, self._left = machine, source, False
        self._quorums = Quorums(machine)
        # What this machine reports; `_report` completes it.
        self._own = Report(
            id=machine.id,
            servers=machine.servers,
            store=machine.store,
            signature=dict(signature),
            min_machines=machine.options.min_machines,
            samples=machine.options.samples_per_step or 1,
        )

    @property
    def joined(self) -> bool:
        return self._own.joined

    @property
    def apart(self) -> float:
        return effective_number(self.participants)

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        return self._source.group if self._source.group.size() > 1 else None

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._machine.connections.group
        assert group is not None  # connected for this outer step
        return group

    def bind(self, steps: OuterSteps, common: CommonState) -> None:
        self._outer, self._common = steps, common
        self.healing.bind(steps, common)
        self.attempts.bind(steps, common)
        if (lighthouse := self._machine.lighthouse) is not None:
            counters = steps.counters
            lighthouse.heartbeats.passes = lambda: counters.backward_passes
        numbers = self._machine.numbers
        numbers.round = lambda: steps.state.step
        numbers.passes = lambda: steps.counters.backward_passes
        numbers.bytes_sent = lambda: steps.counters.bytes_sent

    def stats(self) -> dict[str, Any]:
        return {"members": max(1, len(self.participants)), **self._machine.numbers.stats()}

    def leave(self) -> None:
        """End this machine's part in the training, and tell the others. A later outer step raises
        HookRunError.
        """
        self._left = True
        self.close()

    def forget(self) -> None:
        self.attempts.forget()

    def close(self) -> None:
        self._machine.close()
        self.attempts.close()

    # ---- when another machine has come to the point for which this one trains
    # ----------------------------------------------------------------------------------------------

    def looks_every(self, passes: int) -> int:
        if self.options.wait_for == "all":
            return 0
        return 1 if self._machine.ranks.alone else max(1, passes // _LOOKS)

    def another_is_done(self) -> bool:
        numbers, ranks = self._machine.numbers, self._machine.ranks
        with numbers.waiting():
            over = self._machine.round_end.ends_here(self.attempts.point, numbers.weight)
        return over if ranks.alone else not ranks.all_agree(not over)

    def _tell(self, machines: Sequence[Report]) -> None:
        """Tell `machines` that this one is at the point, unless they know it from another one."""
        round_end, point = self._machine.round_end, self.attempts.point
        others = [machine.servers[0] for machine in machines if machine.id != self._own.id]
        tells = self.options.wait_for == "first" and self.logs
        if tells and others and not round_end.is_over(point):
            round_end.tell(others, point)

    # ---- an outer step
    # ----------------------------------------------------------------------------------------------

    def exchange(self, outer: OuterSteps, due: Due) -> Sent | Exchanged:
        self._own = dataclasses.replace(self._own, at_once=True, whole=due.fragment is None)
        result = self._meet(due)
        if result is _Result.NEW_ROUND and self._own.whole and not self.attempts.whole:
            result = self._meet(due)  # a fragment had to be exchanged again first
        return self._exchanged(result)

    def send(self, outer: OuterSteps, due: Due) -> Sent | Exchanged:
        self._own = dataclasses.replace(self._own, at_once=False, whole=False)
        return self._exchanged(self._meet(due))

    def apply(self, outer: OuterSteps, due: Due) -> Sent | Applied:
        result = self._exchanged(self._meet(due))
        return result if isinstance(result, Sent) else Applied(result.fragment)

    def _exchanged(self, result: "_Result") -> Sent | Exchanged:
        turn = self.attempts.turn
        if result is _Result.IN_FLIGHT:
            return Sent(turn)
        before = (turn - 1) % self._outer.rules.fragments
        return Exchanged(counts=result is _Result.NEW_ROUND, fragment=before)

    def _meet(self, due: Due) -> "_Result":
        """Meet the other machines, and take an outer step with them or the state of one of them.
        Raises AttachError before the first outer step, if this machine does not match the others.
        """
        if self._left:
            raise HookRunError("members: this machine has left the run (members.leave)")
        deadline = None if due.limit_s is None else time.monotonic() + due.limit_s
        self._tell(self.participants)
        if self.attempts.arrive(deadline):
            self._failed()
        result, failures = _Result.SAME_ROUND, list[str]()
        while True:
            decision = self._decide(due.trained, deadline)
            match decision.action:
                case QuorumAction.REFUSED:
                    raise AttachError(f"members: {decision.reason}")
                case QuorumAction.WAIT:
                    self._machine.lines.say("%s", decision.reason, about=decision.reason)
                    time.sleep(decision.pause_s)
                case QuorumAction.COMMIT:
                    result = _Result.NEW_ROUND
                    if self._commit() and decision.participants:
                        self._begin(decision)
                        return result
                case QuorumAction.ABANDON:
                    self.attempts.abandon()
                case QuorumAction.ASK_AGAIN:
                    pass
                case QuorumAction.HEAL:
                    self._heal(decision, due.trained, deadline)
                    result = _Result.NEW_ROUND
                case QuorumAction.BEGIN:
                    self._begin(decision)
                    self.healing.serve(decision)
                    return result
                case QuorumAction.EXCHANGE:
                    if self._exchange(decision, due.trained, deadline, failures):
                        if not decision.at_once:
                            self._go_on(decision)
                            return _Result.IN_FLIGHT
                        self._commit()
                        self._begin(decision)
                        self.healing.serve(decision)
                        return _Result.NEW_ROUND

    def _decide(self, trained: int, deadline: float | None) -> Decision:
        self._own = dataclasses.replace(self._own, number=self._own.number + 1)
        return self._quorums.decide(self._report(trained), deadline)

    def _report(self, trained: int) -> Report:
        state, connections = self._outer.state, self._machine.connections
        anchors = [*state[ANCHOR.key].values(), *state[MOMENTUM.key].values()]
        return dataclasses.replace(
            self._own,
            step=state.step,
            anchor=self._machine.ranks.key_of_shards(self._common.digest(anchors)),
            **self.attempts.reported(self._own, trained),
            connection=connections.name,
            unreachable=tuple(connections.unreachable),
            failed_heals=self.healing.failed,
            reads=self.healing.reads,
        )

    def _heal(self, decision: Decision, trained: int, deadline: float | None) -> None:
        """Take the state of another machine."""
        if self.healing.heal(decision, self._machine.limit_s(deadline)):
            self._own = dataclasses.replace(self._own, joined=True)
        self.attempts.begin(trained)

    def _exchange(
        self, decision: Decision, trained: int, deadline: float | None, failures: list[str]
    ) -> bool:
        """Exchange, and return whether all machines can commit, or the exchange is in flight.
        Raises HookRunError when exchanges have failed several times in turn; `failures` collects
        the texts.
        """
        own = next(machine for machine in decision.machines if machine.id == self._own.id)
        failure = self.attempts.run(decision, own, trained, self._machine.limit_s(deadline))
        if not failure:
            return True
        failures.append(failure)
        self._failed()
        if not decision.at_once:  # for others it may be in flight
            self._tell(decision.machines)
        if len(failures) >= _MOST_FAILURES:
            raise HookRunError(
                f"members: the outer step failed {len(failures)} times in turn: {failure}"
            )
        return False

    def _failed(self) -> None:
        """Count an attempt that has failed. It stays; the next quorum commits or abandons it."""
        attempt = self.attempts.current
        assert attempt is not None
        if self._machine.ranks.exchanges:
            unexplained = 0 if attempt.explained else self._own.unexplained + 1
            self._own = dataclasses.replace(self._own, unexplained=unexplained)

    def _commit(self) -> bool:
        """Commit the attempt. Return whether it was behind the training."""
        attempt = self.attempts.current
        assert attempt is not None
        self.attempts.commit()
        self._machine.history.round = self.attempts.round
        self._own = dataclasses.replace(self._own, exchanged=True, unexplained=0)
        return not attempt.decision.at_once

    def _begin(self, decision: Decision) -> None:
        """Begin a round with the participants of `decision`."""
        self._machine.numbers.begin_round()
        self._machine.history.round = self.attempts.round
        self._go_on(decision)

    def _go_on(self, decision: Decision) -> None:
        """Train on with the participants of `decision`."""
        self.participants = decision.participants
        self._own = dataclasses.replace(self._own, joined=True)
        self._machine.round_end.begin(self.attempts.point)
        self.healing.reads = ""
