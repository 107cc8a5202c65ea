"""What a machine tells the others before an outer step (`Report`), and what each of them does then
(`decide`).

Pure Python: no torch, no clock, no socket. All machines of a quorum get the same reports, so each
of them knows what the others decide.

**Machines that meet never keep different outcomes of an outer step.** An exchange goes like
this:

1. All differences are exchanged, and neither anchor nor weights are written.
2. All machines confirm, in one small collective, that everything has arrived. It ends only if
   all have begun it.
3. A machine whose confirmation ends writes the new anchor.

Let X be an exchange in which something has failed, at step s.

- A confirmation has ended somewhere: then all machines of X have begun to confirm, so X is
  complete on all of them, and stays complete until they write it. A machine of X that has
  written reports step s + 1, and is not asked. One at step s reports X as complete, or has
  abandoned X. The first to abandon X would have needed a report at step s that X is incomplete,
  and there is none. So nobody is the first to abandon, and all that meet COMMIT.
- No confirmation has ended: nobody has written. The machines that meet see the same reports, so
  they all COMMIT, if X is complete on each of them, or all ABANDON and exchange the same
  differences again. Either way no step is lost.
- A machine of X that comes later finds machines of X at a later step. If X is complete on it,
  it commits X, otherwise it abandons X and heals. If the others have committed X, it has their
  anchor. If they have abandoned X, it finds at the next quorum that its anchor is another one,
  and heals: the anchor with which machines have trained goes before one with which none has,
  then that of machines that participate, then that of the most machines, then that of the first
  by id.

Machines that never meet may go different ways, such as the two sides of a broken network. When
they meet, the latest anchor wins, and the other side heals.

**An exchange behind the training** (`delay`) belongs to the quorum in which it began. Nobody
confirms: when it is due, its machines ask for a quorum, in which each reports it as complete or
not, as after a failure. That is the second case. So they commit what a machine has sent that died
after it, and otherwise exchange the same differences again, at once, without the machine that is
missing. If the answer of this quorum reaches only some of them, they may COMMIT and train on; the
others ask again, report X as complete, and COMMIT when they meet them, at step s + 1. Only one that
first meets a machine for which X is incomplete, and which was not in that quorum, abandons X; and
it heals when it meets the others, as above.

In a sharded model each rank exchanges its shard in a group per shard, and the ranks of a
machine agree before they confirm and before they write, so that a machine acts as one: a rank
begins its confirmation only after everything has arrived on all ranks of its machine, and a
machine writes at once only if all of its confirmations have ended. If one has not, all of its
ranks keep what has arrived, and the machine reports X as complete.
"""

import dataclasses
import enum
import functools
import hashlib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 5
"""Changes with the protocol between machines, so that another version of commhooks is refused if it
must be.
"""
UNEXPLAINED_LIMIT = 2
"""A newcomer is refused when so many exchanges with it have failed in turn, although all machines
reach each other.
"""

MOST_SAME_NAMES = 10
"""A machine that was restarted waits for its former self to disappear. After so many reports it is
another machine of the same name, and is refused.
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a machine says when it asks for a quorum.

    Attributes:
        id: the name of the machine with a random number, so that a machine that was restarted is
            another one.
        number: of this report among those of the machine. A machine that has sent a later one no
            longer acts on this quorum.
        servers: the address of the `StateServer` of each shard.
        store: the address of its `TCPStore`.
        signature: what must be equal on all machines, by name.
        min_machines: the option; the largest of all machines counts.
        step: outer steps that are in its anchor.
        anchor: a digest of its anchor and momentum.
        joined: whether it has begun a round with the others, or as the first.
        steps: that the differences contain which it exchanges next; 0: it has none.
        done: steps since the latest exchange, after which all stood where one of them did.
        samples: in each of these steps; 1 if machines count by steps.
        attempt: the name of an exchange of which this machine does not know whether the others have
            committed it; "" if there is none.
        attempt_with: the ids of the machines of that exchange.
        complete: whether everything of that exchange has arrived here.
        at_once: whether its training waits for the exchange; otherwise it would train on meanwhile.
        again: whether it exchanges what was in flight, and was abandoned.
        whole: whether it exchanges all weights, because it leaves; otherwise a fragment.
        connection: the name of the connections that it holds; "" without.
        unreachable: the ids of machines with which it could not connect.
        unexplained: exchanges with others that have failed in turn, although it reached every
            machine.
        exchanged: whether it has ever committed an outer step, with others or alone, and not only
            healed.
        failed_heals: how often in turn it has failed to take the state of another machine.
        reads: the id of the machine whose state it has taken, and whose outer steps it reads; ""
            without.
        left: whether it has left the run. The other fields of the report then mean nothing.
    """

    id: str
    number: int = 0
    servers: tuple[str, ...] = ()
    store: str = ""
    signature: Mapping[str, str] = field(default_factory=dict, hash=False)
    min_machines: int = 1
    step: int = 0
    anchor: int = 0
    joined: bool = False
    steps: int = 0
    done: int = 0
    samples: int = 1
    attempt: str = ""
    attempt_with: tuple[str, ...] = ()
    complete: bool = False
    at_once: bool = True
    again: bool = False
    whole: bool = False
    connection: str = ""
    unreachable: tuple[str, ...] = ()
    unexplained: int = 0
    exchanged: bool = False
    failed_heals: int = 0
    reads: str = ""
    left: bool = False

    @property
    def name(self) -> str:
        return self.id.rpartition(":")[0]

    @property
    def trained(self) -> bool:
        return self.steps > 0

    @property
    def work(self) -> int:
        """The weight of its differences in the mean."""
        return self.steps * self.samples

    @property
    def host(self) -> str:
        """The host in the address of the first server, without brackets."""
        return self.servers[0].rpartition(":")[0].strip("[]") if self.servers else ""

    def to_json(self) -> dict[str, Any]:
        """Return the content of the report for JSON. Its inverse is `read`."""
        return {"commhooks": VERSION, **dataclasses.asdict(self), "signature": dict(self.signature)}


class NotAReport(ValueError):
    """Raised for what another program has sent to the same lighthouse; the message says what it
    is.
    """


def read(id: str, content: object) -> Report:
    """Check what the machine `id` has sent. A report of another version is returned without its
    content, but with a signature that says so. Raises NotAReport if this is not from commhooks, or
    damaged.
    """
    if not isinstance(content, Mapping) or type(content.get("commhooks")) is not int:
        raise NotAReport(f"{id!r} of another job")
    if content.get("left") is True:
        return Report(id=id, left=True)
    if content["commhooks"] != VERSION:
        signature = {"protocol between machines": str(content["commhooks"])}
        joined = content.get("joined") is True
        return Report(id=id, signature=signature, joined=joined)
    values = {
        member.name: _checked(id, member.name, content.get(member.name))
        for member in dataclasses.fields(Report)
    }
    if values["id"] != id:
        raise NotAReport(f"{id!r}, which reports as {values['id']!r}")
    return Report(**values)


_TEXTS = ("id", "store", "attempt", "connection", "reads")
_LISTS = ("servers", "attempt_with", "unreachable")
_FLAGS = ("joined", "complete", "at_once", "again", "whole", "exchanged", "left")


def _checked(id: str, name: str, value: object) -> Any:
    if name in _TEXTS:
        good = isinstance(value, str)
    elif name in _LISTS:
        good = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        value = tuple(value) if isinstance(value, list | tuple) else value
    elif name in _FLAGS:
        good = isinstance(value, bool)
    elif name == "signature":
        good = isinstance(value, Mapping) and all(
            isinstance(x, str) for item in value.items() for x in item
        )
    else:
        good = type(value) is int and value >= 0
    if not good or (name == "servers" and not value) or (name == "samples" and not value):
        raise NotAReport(f"{id!r}, whose {name} is damaged")
    return value


class QuorumAction(enum.Enum):
    """What a machine does after a quorum."""

    COMMIT = "commit the attempt of which it was not known whether others have, then ask again"
    ABANDON = "forget the attempt, then ask again"
    ASK_AGAIN = "ask again: other machines end their attempt first"
    EXCHANGE = (
        "exchange the differences with `machines`: `at_once`, then confirm, and commit if the"
        " confirmation ends, or behind the training, and ask again when it is due"
    )
    HEAL = "take the state of `source` after outer step `step`"
    BEGIN = "begin a round: nobody has trained"
    WAIT = "do not take part, for the `reason`, and ask again"
    REFUSED = "end with the error `reason`"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one machine does after a quorum.

    Attributes:
        step: outer steps in the anchor of those who take part, after this decision; for HEAL,
            EXCHANGE and BEGIN.
        machines: that exchange (EXCHANGE) or begin (BEGIN), sorted by id; this one is among them.
        heals: the machines that take the state of this one.
        participants: the machines that train on after this decision. For COMMIT: those that
            commit, and need no other quorum; empty if others are ahead, and they do.
        left_out: why machines do not take part, a sentence each.
        pause_s: how long to wait before this machine asks again.
        source: whose state to take.
        name: of the exchange. The connections that were made under another name are used again if
            `reuse`.
        at_once: whether the training waits for the exchange. It does if any machine waits, which
            leaves or exchanges again, or heals.
        whole: whether all weights are exchanged, because a machine leaves; what must be exchanged
            again goes before.
    """

    action: QuorumAction
    reason: str = ""
    step: int = 0
    machines: tuple[Report, ...] = ()
    heals: tuple[Report, ...] = ()
    participants: tuple[Report, ...] = ()
    left_out: tuple[str, ...] = ()
    pause_s: float = 0.0
    source: Report | None = None
    name: str = ""
    reuse: bool = False
    at_once: bool = True
    whole: bool = False


def decide(reports: Sequence[Report], me: str) -> Decision:
    """Return what the machine `me` does after a quorum with these reports, one per machine.

    The machines that have joined and have the latest anchor exchange their differences. All others
    heal: they take the state of one of them after the exchange, and its later outer steps, while
    the machines that have exchanged train on without them. When they have the latest anchor, they
    ask again, and are among these machines. So a machine that comes heals, whenever it comes; only
    machines that begin in the same quorum, with the same anchor, begin without. The module says why
    no outer step is kept by some machines and not by others.
    """
    present = sorted(
        (report for report in reports if not report.left), key=lambda report: report.id
    )
    own = next((report for report in present if report.id == me), None)
    if own is None:
        reason = f"the others have declared {me.rpartition(':')[0]} dead, and it asks again"
        return Decision(action=QuorumAction.WAIT, reason=reason, pause_s=0.1)
    if reason := _refusal(own, present) or _never_exchanged(own, present):
        return Decision(action=QuorumAction.REFUSED, reason=reason)
    alike = _alike(own, present)
    if own not in alike:
        reason = f"{own.name} waits for another machine of this name to end"
        return Decision(action=QuorumAction.WAIT, reason=reason, pause_s=1.0)
    if any(report.attempt for report in alike):
        return _settle(own, alike)
    reached, cut_off = _reached(alike)
    if me in cut_off:
        return Decision(action=QuorumAction.WAIT, reason=cut_off[me])
    least = max(report.min_machines for report in alike)
    if len(reached) < least:
        there = (
            f"{len(reached)} of min_machines={least} {'is' if len(reached) == 1 else 'are'} here;"
            " waiting"
        )
        return Decision(
            action=QuorumAction.WAIT, reason=there, left_out=tuple(cut_off.values()), pause_s=1.0
        )
    return dataclasses.replace(_step(own, reached), left_out=tuple(cut_off.values()))


def _settle(own: Report, reports: Sequence[Report]) -> Decision:
    """End attempts whose outcome is unknown. Machines without one ask again: the steps may
    change.
    """
    if not own.attempt:
        return Decision(action=QuorumAction.ASK_AGAIN)
    # Those that have committed are one step ahead. At this step, an empty attempt means that it was
    # abandoned.
    undecided = [
        report for report in reports if report.id in own.attempt_with and report.step == own.step
    ]
    if not all(report.attempt == own.attempt and report.complete for report in undecided):
        return Decision(action=QuorumAction.ABANDON)
    ahead = any(report.step > own.step for report in reports)
    return Decision(action=QuorumAction.COMMIT, participants=() if ahead else tuple(undecided))


def _step(own: Report, reports: Sequence[Report]) -> Decision:
    latest = _with_latest_anchor(reports)
    behind = [report for report in reports if report not in latest]
    trained = any(report.trained for report in latest)
    step = latest[0].step + trained
    sources = {
        report.id: next(
            (other for other in latest if other.id == report.reads),
            latest[(place + report.failed_heals) % len(latest)],
        )
        for place, report in enumerate(behind)
    }
    if own not in latest:
        return Decision(action=QuorumAction.HEAL, step=step, source=sources[own.id])
    again = any(report.again for report in latest)
    numbers = [(report.id, report.number) for report in latest]
    connection = latest[0].connection
    return Decision(
        action=QuorumAction.EXCHANGE if trained else QuorumAction.BEGIN,
        step=step,
        machines=tuple(latest),
        heals=tuple(report for report in behind if sources[report.id] is own),
        participants=tuple(latest),
        at_once=bool(behind) or again or any(report.at_once for report in latest),
        whole=not again and any(report.whole for report in latest),
        name=connection_name(latest, numbers),
        reuse=connection.startswith(connection_name(latest))
        and all(x.connection == connection for x in latest),
    )


def share_of(own: Report, machines: Sequence[Report]) -> float:
    """Return the weight of the differences of `own` in the mean of `machines`, some of which have
    trained: 1 if all have done equal work.
    """
    return len(machines) * own.work / sum(machine.work for machine in machines)


def effective_number(machines: Sequence[Report]) -> float:
    """Return the number of equal machines whose mean has as little noise as that of `machines`:
    (sum of w)^2 / sum of w^2. A machine that has done nothing yet is taken for one of the fastest.
    """
    most = max((machine.work for machine in machines), default=0) or 1
    works = [machine.work or most for machine in machines]
    return sum(works) ** 2 / sum(work**2 for work in works) if works else 1.0


def furthest(machines: Sequence[Report]) -> Report | None:
    """Return the machine that has done most steps since the latest exchange, the first of equals;
    None if all are equal.
    """
    most = max(machines, key=lambda machine: machine.done)
    return most if any(machine.done < most.done for machine in machines) else None


def connection_name(machines: Iterable[Report], numbers: object = None) -> str:
    """Return a name for connections among `machines`: no two quorums have the same `numbers`.
    Without them, return its beginning, which is the same for all connections among these machines.
    """
    ids = _key([report.id for report in machines])
    return f"{ids}-" if numbers is None else f"{ids}-{_key(numbers)}"


def _key(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# ---- who takes part
# --------------------------------------------------------------------------------------------------


def _with_latest_anchor(reports: Sequence[Report]) -> list[Report]:
    """Return the machines that have the latest anchor. Of several anchors of the same step, take
    the one with which machines have trained, then the one of machines that participate, then that
    of the most machines. A newcomer with the same anchor counts as behind, unless all of them are
    newcomers.
    """
    most = max(report.step for report in reports)
    top = [report for report in reports if report.step == most]

    def weight(report: Report) -> tuple[bool, bool, int]:
        same = [other for other in top if other.anchor == report.anchor]
        participate = [other for other in same if other.joined]
        return any(other.trained for other in same), bool(participate), len(participate or same)

    best = max(top, key=weight)  # the first of equals
    same = [report for report in top if report.anchor == best.anchor]
    return [report for report in same if report.joined] or same


def _refusal(own: Report, present: Sequence[Report]) -> str:
    """Return why this machine must end, which is new and does not match the machines that have
    begun. Of machines that begin together, the first stays; "" if nothing is wrong.
    """
    elders = [report for report in present if report.joined] or [present[0]]
    if own in elders:
        return ""
    alike = [report for report in elders if report.signature == own.signature]
    if not alike:
        elder = elders[0]
        what = next(
            what
            for what in [*elder.signature, *own.signature]
            if own.signature.get(what) != elder.signature.get(what)
        )
        return (
            f"machine {own.name} has another {what} than machine {elder.name} "
            f"({own.signature.get(what)} and {elder.signature.get(what)}): start it as the others"
        )
    if own.number > MOST_SAME_NAMES and any(own.name == elder.name for elder in elders):
        return (
            f"two machines have the name {own.name}: give each a name of its own"
            " (commhooks.Torchft(name=...))"
        )
    for elder in alike:
        if is_loopback(own.host) != is_loopback(elder.host):
            local = own if is_loopback(own.host) else elder
            other = elder if local is own else own
            return (
                f"machine {local.name} has the address {local.host}, at which only its own host"
                f" reaches it, and machine {other.name} has {other.host}: start {local.name} with"
                " TORCHFT_LIGHTHOUSE set to an address of the lighthouse that other hosts reach"
            )
    return ""


def _never_exchanged(own: Report, present: Sequence[Report]) -> str:
    """Return why this machine must end, with which no exchange has ever succeeded; "" if nothing is
    wrong. If none has with any machine, the first stays.
    """
    if own.exchanged or own.unexplained < UNEXPLAINED_LIMIT:
        return ""
    alike = [report for report in present if report.signature == own.signature]
    if own in ([report for report in alike if report.exchanged] or alike[:1]):
        return ""
    return (
        f"machine {own.name} and the others reach each other at {own.host}, but could not exchange"
        f" {own.unexplained} times in turn. Does a firewall close other ports, or does"
        " GLOO_SOCKET_IFNAME name another network?"
    )


def _alike(own: Report, present: Sequence[Report]) -> list[Report]:
    """Return the machines with the signature of this one that are not refused, each name once:
    those that participate, then newcomers, sorted by id.
    """
    alike: list[Report] = []
    for report in sorted(present, key=lambda report: (not report.joined, report.id)):
        same_name = any(report.name == other.name for other in alike)
        refused = _refusal(report, present) or _never_exchanged(report, present)
        if report.signature == own.signature and not same_name and not refused:
            alike.append(report)
    return alike


@functools.cache
def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _reached(reports: Sequence[Report]) -> tuple[list[Report], dict[str, str]]:
    """Leave out machines until each reaches every other one: the one in most of the failed
    connections first; of equals a newcomer, then the one that others could not reach, then the
    last. Return the machines that stay, and the reason for each of the others.
    """
    reached, cut_off = list(reports), dict[str, str]()
    while True:
        ids = {report.id for report in reached}
        failed = [
            (report.id, other) for report in reached for other in report.unreachable if other in ids
        ]
        if not failed:
            return reached, cut_off

        def blame(
            report: Report, failed: list[tuple[str, str]] = failed
        ) -> tuple[int, bool, int, str]:
            involved = sum(report.id in pair for pair in failed)
            unreached = sum(report.id == to for _, to in failed)
            return involved, not report.joined, unreached, report.id

        worst = max(reached, key=blame)
        reached.remove(worst)
        names = {report.id: report.name for report in reports}
        pairs = (
            f"{names[of]} cannot connect with {names[to]}"
            for of, to in failed
            if worst.id in (of, to)
        )
        at = f"{worst.name} is at {', '.join(worst.servers)}"
        cut_off[worst.id] = f"{worst.name} does not take part, because {', '.join(pairs)} ({at})"
