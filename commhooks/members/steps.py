"""Outer steps among machines that come and go: ask for a quorum, decide (`report.py`), do it."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.nodes import Nodes
from commhooks.errors import AttachError, HookConfigError, HookRunError
from commhooks.gradients.profiling import span
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.common_state import CommonState
from commhooks.local_steps.exchange import OuterExchange
from commhooks.local_steps.fragments import OuterSteps
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM
from commhooks.members.heal import Healing
from commhooks.members.report import Decision, NotAReport, QuorumAction, Report, decide, read
from commhooks.members.this_machine import ThisMachine

_MOST_FAILURES = 5
_ERRORS = (RuntimeError, ValueError, OSError)
"""Raised when a connection is lost. torch 2.13 raises ValueError if it cannot name the group of a
failed collective, because torch.distributed does not know it.
"""


@dataclass
class Attempt:
    """An exchange, until it is known whether all machines commit it. `prepared`: what has arrived;
    None if something is missing.
    """

    decision: Decision
    prepared: OuterExchange | None = None


class MachinePartner:
    """Implements `Partner` for machines that come and go. The ranks of a machine average gradients.

    Attributes:
        participants: the machines that train the running round, sorted by name.
        exchanged_with: the machines of the latest exchange.
        healing: serves and takes states.
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
        self.exchanged_with: tuple[Report, ...] = ()
        self.healing = Healing(machine, source)
        self.options, self.name, self.logs = (
            machine.options,
            machine.id.rpartition(":")[0],
            machine.ranks.is_first,
        )
        self._machine, self._source, self._left = machine, source, False
        self._attempt: Attempt | None = (
            None  # kept if `end_round` raises, because others may have committed it
        )
        self._ranks, self._connections, self._lines = (
            machine.ranks,
            machine.connections,
            machine.lines,
        )
        # What this machine reports; `_report` completes it.
        self._own = Report(
            id=machine.id,
            servers=machine.servers,
            store=machine.store,
            signature=dict(signature),
            min_machines=machine.options.min_machines,
        )

    @property
    def joined(self) -> bool:
        return self._own.joined

    @property
    def apart(self) -> int:
        return max(1, len(self.participants))

    @property
    def averaging_group(self) -> dist.ProcessGroup | None:
        return self._source.group if self._source.group.size() > 1 else None

    @property
    def group(self) -> dist.ProcessGroup:
        assert self._connections.group is not None  # connected for this outer step
        return self._connections.group

    def bind(self, steps: OuterSteps, common: CommonState) -> None:
        self._outer, self._common = steps, common
        self.healing.bind(steps, common)
        if (lighthouse := self._machine.lighthouse) is not None:
            counters = steps.counters
            lighthouse.heartbeats.passes = lambda: counters.backward_passes
        numbers = self._machine.numbers
        numbers.round = lambda: steps.state.step
        numbers.passes = lambda: steps.counters.backward_passes
        numbers.bytes_sent = lambda: steps.counters.bytes_sent

    def stats(self) -> dict[str, Any]:
        return {"members": self.apart, **self._machine.numbers.stats()}

    def leave(self) -> None:
        """End this machine's part in the training, and tell the others. `end_round` then raises
        HookRunError.
        """
        self._left = True
        self.close()

    def close(self) -> None:
        self._machine.close()

    # ---- an outer step
    # ----------------------------------------------------------------------------------------------

    def end_round(
        self, exchange: Callable[[], None], *, trained: bool, limit_s: float | None
    ) -> bool:
        """See `Partner`. Meet the other machines, and take an outer step with them or the state of
        one of them. `exchange` is not called, because it would write before the others have
        confirmed. Return whether a new round begins; False if no machine had trained, and the
        running round goes on. Raises AttachError before the first outer step, if this machine does
        not match the others.
        """
        if self._left:
            raise HookRunError("members: this machine has left the training (members.leave)")
        deadline = None if limit_s is None else time.monotonic() + limit_s
        new_round, failures = False, 0
        while True:
            decision = self._decide(trained, deadline)
            match decision.action:
                case QuorumAction.REFUSED:
                    raise AttachError(f"members: {decision.reason}")
                case QuorumAction.WAIT:
                    self._lines.say("%s", decision.reason, about=decision.reason)
                    time.sleep(decision.pause_s)
                case QuorumAction.COMMIT:
                    self._commit()
                    trained, new_round = False, True
                case QuorumAction.ABANDON:
                    self._attempt = None
                case QuorumAction.ASK_AGAIN:
                    pass
                case QuorumAction.HEAL:
                    assert decision.source is not None
                    new_round = self.joined or decision.step > decision.source.step
                    if self.healing.heal(decision, self._limit(deadline)):
                        self._begin(decision)
                        return new_round
                case QuorumAction.BEGIN:
                    self.healing.serve(decision)
                    self._begin(decision)
                    return new_round
                case QuorumAction.EXCHANGE:
                    failure = self._exchange(decision, deadline)
                    if not failure:
                        self._commit()
                        self.healing.serve(decision)
                        self._begin(decision)
                        return True
                    failures += 1
                    self._lines.say(
                        "an outer step among %s failed, and the machines meet again: %s",
                        _names(decision.machines),
                        failure,
                        about=decision.name,
                    )
                    if failures >= _MOST_FAILURES:
                        raise HookRunError(
                            f"members: the outer step failed {failures} times in turn: {failure}"
                        )

    def _commit(self) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None and attempt.prepared is not None
        self._outer.commit_prepared(attempt.prepared)
        self._own = dataclasses.replace(self._own, exchanged=True, unexplained=0)

    def _decide(self, trained: bool, deadline: float | None) -> Decision:
        """Ask for a quorum, and decide. The result is the same on all ranks of this machine."""
        self._own = dataclasses.replace(self._own, number=self._own.number + 1, trained=trained)
        self._connections.number = self._own.number
        reports = self._quorum(self._report(), deadline)
        if reports is None:
            raise HookRunError(
                "members: the other machines did not come to their outer step in time"
            )
        self._connections.forget(reports)
        decision = decide(reports, self._own.id)
        for reason in decision.left_out:
            self._lines.say("%s", reason, about=reason)
        return decision

    def _report(self) -> Report:
        state, attempt = self._outer.state, self._attempt
        anchors = [*state[ANCHOR.key].values(), *state[MOMENTUM.key].values()]
        return dataclasses.replace(
            self._own,
            step=state.step,
            anchor=self._ranks.key_of_shards(self._common.digest(anchors)),
            attempt="" if attempt is None else attempt.decision.name,
            attempt_with=() if attempt is None else tuple(x.id for x in attempt.decision.machines),
            complete=attempt is not None and attempt.prepared is not None,
            connection=self._connections.name,
            unreachable=tuple(self._connections.unreachable),
            failed_heals=self.healing.failed,
        )

    def _quorum(self, report: Report, deadline: float | None) -> list[Report] | None:
        """Return the reports of all machines that are alive, the same on all ranks of this machine;
        None after `deadline`. The report of the first rank counts.
        """
        text, lighthouse = "", self._machine.lighthouse
        if lighthouse is not None:
            with span("quorum", self.name), self._machine.numbers.waiting():
                quorum = lighthouse.quorum(report, deadline)
            text = json.dumps(
                {
                    "orphaned": lighthouse.heartbeats.orphaned,
                    "refusal": lighthouse.refusal,
                    "quorum": quorum or [],
                }
            )
        content = json.loads(self._ranks.first_text(text))
        if content["orphaned"]:
            raise HookRunError(
                "members: the torchrun that has started this machine is gone, so the machine ends"
            )
        if content["refusal"]:
            raise AttachError(f"members: {content['refusal']}")
        reports, strangers = read_all(content["quorum"])
        if lighthouse is not None:
            lighthouse.seen(reports)
        if strangers:
            self._lines.say(
                "another job uses the lighthouse, and is ignored: %s. Give each run a lighthouse of"
                " its own, because it waits for all machines that use it",
                ", ".join(strangers[:3]),
                once=True,
            )
        return reports or None

    def _begin(self, decision: Decision) -> None:
        """Begin a round with the participants of `decision`."""
        self._machine.numbers.begin_round()
        self.participants = decision.participants
        self._own = dataclasses.replace(self._own, joined=True)

    def _exchange(self, decision: Decision, deadline: float | None) -> str:
        """Exchange the differences, and confirm: steps 1 and 2 of the proof in `decide`. Returns a
        text about what failed; "" if all machines can commit. It is a text, because an exception
        would keep the connections open, and the others wait until they are closed.
        """
        self._attempt = attempt = Attempt(decision)
        failure, unreachable = "", tuple[str, ...]()
        # an error may occur on one rank of the machine only: no collective inside the machine
        # before they agree
        try:
            self._arrive(attempt, self._limit(deadline))
        except _ERRORS as error:
            failure, unreachable = _not_ours(error), getattr(error, "unreachable", ())
        arrived = confirmed = self._ranks.all_agree(not failure)
        if not arrived:
            attempt.prepared = None
        else:
            try:
                if self._ranks.exchanges:
                    self._connections.confirm()
            except _ERRORS as error:
                failure = _not_ours(error)
            confirmed = self._ranks.all_agree(not failure)
        if not confirmed and self._ranks.exchanges:
            self._connections.give_up(decision.name)
            all_answer = self._connections.all_answer(decision.machines, unreachable)
            unexplained = self._own.unexplained + 1 if all_answer else 0
            self._own = dataclasses.replace(self._own, unexplained=unexplained)
        return "" if confirmed else failure or "another rank of this machine has failed"

    def _arrive(self, attempt: Attempt, limit_s: float) -> None:
        """Connect, and exchange all differences. Anchor, momentum and trained weights are not
        written; what is not trained becomes the first machine's, which a repeated exchange does
        again.
        """
        machines = attempt.decision.machines
        trained = sum(machine.trained for machine in machines)
        weight = len(machines) / trained if self._own.trained else 0.0
        self.exchanged_with = machines
        self._machine.numbers.weight = weight / len(machines)
        if self._ranks.exchanges and not attempt.decision.reuse:
            self._connections.connect(machines, attempt.decision.name, limit_s)
        prepared = self._outer.prepare(weight, exchanges=self._ranks.exchanges)
        prepared.begin()
        prepared.finite()
        if self._ranks.exchanges:
            self._common.share(optimizers=False, group=self._connections.group)
        attempt.prepared = prepared

    def _limit(self, deadline: float | None) -> float:
        timeout_s = self._machine.timeout_s()
        return (
            timeout_s if deadline is None else max(0.0, min(timeout_s, deadline - time.monotonic()))
        )


def read_all(quorum: Sequence[tuple[str, object]]) -> tuple[list[Report], list[str]]:
    """Return the reports of a quorum, and what others have sent to the lighthouse."""
    reports, strangers = list[Report](), list[str]()
    for id, content in quorum:
        try:
            reports.append(read(id, content))
        except NotAReport as error:
            strangers.append(str(error))
    return reports, strangers


def _not_ours(error: Exception) -> str:
    """Return the text of `error`, or raise it if another attempt would not help."""
    if isinstance(error, (torch.OutOfMemoryError, HookConfigError)):
        raise error
    return str(error) or type(error).__name__


def _names(machines: Sequence[Report]) -> str:
    return ", ".join(machine.name for machine in machines)
