"""Ask for a quorum on all ranks of a machine, and decide."""

import json
from collections.abc import Sequence

from commhooks.errors import AttachError, HookRunError
from commhooks.gradients.profiling import span
from commhooks.members.report import Decision, NotAReport, Report, decide, read
from commhooks.members.this_machine import ThisMachine


class Quorums:
    """Asks for quorums. All ranks of the machine must call each method together."""

    def __init__(self, machine: ThisMachine) -> None:
        self._machine = machine
        self._name = machine.id.rpartition(":")[0]

    def decide(self, report: Report, deadline: float | None) -> Decision:
        """Ask for a quorum with this report, and decide. The result is the same on all ranks of
        this machine. Raises HookRunError after `deadline`, and AttachError without the secret of
        the others.
        """
        connections, lines = self._machine.connections, self._machine.lines
        connections.number = report.number
        with self._machine.numbers.waiting():
            reports = self.ask(report, deadline)
        if reports is None:
            raise HookRunError(
                "members: the other machines did not come to their outer step in time"
            )
        connections.forget(reports)
        decision = decide(reports, report.id)
        for reason in decision.left_out:
            lines.say("%s", reason, about=reason)
        return decision

    def ask(self, report: Report, deadline: float | None) -> list[Report] | None:
        """Return the reports of all machines that are alive, the same on all ranks of this machine;
        None after `deadline`. The report of the first rank counts.
        """
        text, lighthouse = "", self._machine.lighthouse
        if lighthouse is not None:
            with span("quorum", self._name):
                quorum = lighthouse.quorum(report, deadline)
            text = json.dumps(
                {
                    "orphaned": lighthouse.heartbeats.orphaned,
                    "refusal": lighthouse.refusal,
                    "quorum": quorum or [],
                }
            )
        content = json.loads(self._machine.ranks.first_text(text))
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
            self._machine.lines.say(
                "another job uses the lighthouse, and is ignored: %s. Give each run a lighthouse of"
                " its own, because it waits for all machines that use it",
                ", ".join(strangers[:3]),
                once=True,
            )
        return reports or None


def read_all(quorum: Sequence[tuple[str, object]]) -> tuple[list[Report], list[str]]:
    """Return the reports of a quorum, and what others have sent to the lighthouse."""
    reports, strangers = list[Report](), list[str]()
    for id, content in quorum:
        try:
            reports.append(read(id, content))
        except NotAReport as error:
            strangers.append(str(error))
    return reports, strangers
