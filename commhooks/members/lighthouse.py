"""Talk to a lighthouse of torchft: the quorum of the machines that are alive.

torchft 0.2: `torchft.coordination` is its public low-level interface. Its `Manager` is not used,
because it sends the state of a machine that joins while the others wait, and gives up the work of a
step that failed. Of its `ManagerServer`, only the heartbeats are used: native threads send them.

The lighthouse gives a list (the quorum) to all machines at once, when all those have asked that it
declares alive: a heartbeat or request has come from them in the last 5 s. It leaves out machines
that have not asked after `--wait-s`, but not if half or more of all have not. Nobody can tell it
that a machine has left or died, so the others answer for this machine (`Absent`): those that notice
its death, and in the quorums after that the first one by id.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from commhooks.errors import AttachError, HookConfigError
from commhooks.members.client import NETWORK_ERRORS, Client, listens
from commhooks.members.heartbeats import CONNECT_LIMIT_S, HEARTBEAT_S, Heartbeats
from commhooks.members.lines import LINE_EVERY_S, Lines
from commhooks.members.report import Report
from commhooks.members.secret import Key, refusal
from commhooks.members.status_page import machines_at
from commhooks.members.watch import Watch

VARIABLE = "TORCHFT_LIGHTHOUSE"
_ALIVE_FOR_S = 5.0
_ANSWERED_FOR_S = 6.0
"""The lighthouse declares a machine alive for 5 s after its last request; in this time, the others
answer for it.
"""
_POST_LIMIT_S = 0.5
_ASK_AGAIN_S = 0.5
_LOOK_EVERY_S = 1.0

Quorum = list[tuple[str, Any]]
"""The id of each machine, and what it has sent."""


def check_torchft() -> None:
    """Raise HookConfigError if torchft is missing or too old."""
    try:
        from torchft.coordination import LighthouseClient  # noqa: F401
    except ImportError as error:
        raise HookConfigError(
            f'members="torchft" needs torchft 0.2 or newer ({error}): pip install'
            ' "commhooks[members]"'
        ) from error


def address_of(given: str | None) -> str:
    """Return the address of the lighthouse, from the option or the environment. Raises
    HookConfigError.
    """
    address = given or os.environ.get(VARIABLE, "")
    if not address:
        raise HookConfigError(
            f"members without a lighthouse: set {VARIABLE}=http://host:29510 to the address that"
            " `commhooks lighthouse` prints, or give commhooks.Torchft(lighthouse=...)"
        )
    with contextlib.suppress(ValueError):  # of a port that is no number
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port:
            return address
    raise HookConfigError(
        f"the address of the lighthouse is {address!r}; expected one with http:// and a port, such"
        " as http://10.0.0.5:29510"
    )


class Absent:
    """The machines for which this one answers, because they cannot: they have left, or their
    process has ended.

    A process that has not ended after all finds in a quorum that it has left, and asks again under
    the next name (`next_name`); its connections then no longer count against it.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._names: dict[str, str] = {}
        self._died: set[str] = set()
        self._lock = threading.Lock()

    def has_died(self, id: str, now: float) -> str | None:
        """Note that the process of a machine has ended. Return the name under which it has asked
        the lighthouse; None if this was wrong before.
        """
        with self._lock:
            if id in self._died:
                return None
            self._died.add(id)
            name = self._names.get(id, id)
            self._since[name] = now
            return name

    def seen(self, quorum: Iterable[tuple[str, bool]], now: float) -> None:
        """Note the names in a quorum, and whether the machine has left."""
        with self._lock:
            for name, left in quorum:
                if left:
                    # To the lighthouse, each answer is a sign of life: go on for as long as quorums
                    # follow each other, or all would wait for this machine once.
                    self._since[name] = now
                else:
                    self._names[id_of(name)] = name

    def names(self, now: float) -> list[str]:
        """Return for which names to answer now."""
        with self._lock:
            return [name for name, at in self._since.items() if now < at + _ANSWERED_FOR_S]


def id_of(name: str) -> str:
    """Return the id of the machine that has asked under this name."""
    head, separator, tail = name.rpartition(":")
    return head + separator + tail.partition("#")[0]


def next_name(name: str) -> str:
    """Return the name under which a machine asks that was declared dead wrongly."""
    return f"{id_of(name)}#{int(name.rpartition(':')[2].partition('#')[2] or 0) + 1}"


class Lighthouse:
    """Connects this machine with the lighthouse, from one rank.

    Args:
        address: of the lighthouse.
        id: of this machine.
        server: the address of this machine's state server.
        store: the address of this machine's store.
        timeout_s: returns after how many seconds a machine that hangs is given up.
        key: of the secret that all machines share.

    Attributes:
        refusal: why this machine must end, because it does not know the secret of others; "" if it
            need not.

    Raises:
        AttachError: it does not answer within `timeout_s()`.
    """

    def __init__(
        self,
        address: str,
        id: str,
        server: str,
        store: str,
        timeout_s: Callable[[], float],
        lines: Lines,
        key: Key | None = None,
    ) -> None:
        from torchft.coordination import LighthouseClient

        self.refusal = ""

        self._address = address
        self._id = id
        self._server = server
        self._store = store
        self._limit_s = timeout_s
        self._lines = lines
        self._key = key
        self._servers = Client(key)
        self._name = id  # under which this machine asks
        self._absent = Absent()
        self._others: dict[str, str] = {}  # the servers of the others in the latest quorum, by id
        self._knows_of_death = False  # of one that was in the latest quorum
        self._request: _Request | None = None
        self._asking = False
        self._closed = threading.Event()
        self._new_client: Callable[[], Any] = lambda: LighthouseClient(
            address, timedelta(seconds=timeout_s())
        )
        try:
            self._client = self._new_client()
        except Exception as error:  # torchft raises RuntimeError and TimeoutError
            raise AttachError(
                f"members: the lighthouse at {address} did not answer within {timeout_s():g} s;"
                f" start it by `commhooks lighthouse`, or correct {VARIABLE}"
                f" ({str(error).rpartition('error: ')[2]})"
            ) from error
        self.heartbeats = Heartbeats(timeout_s, self._new_sender, self._others_train, lines)
        self._watch = Watch(self.has_died, self._servers.watch)

    def _new_sender(self) -> Any:
        from torchft.coordination import ManagerServer

        # Its other services are not used, and only this host reaches them.
        return ManagerServer(
            self._name,
            self._address,
            "127.0.0.1",
            "127.0.0.1:0",
            "",
            1,
            timedelta(seconds=HEARTBEAT_S),
            timedelta(seconds=CONNECT_LIMIT_S),
            0,
        )

    def _others_train(self) -> bool:
        with contextlib.suppress(*NETWORK_ERRORS, ValueError):
            listed = machines_at(self._address)
            return any(machine.server and machine.heartbeat_s < _ALIVE_FOR_S for machine in listed)
        return False

    def quorum(self, report: Report, deadline: float | None) -> Quorum | None:
        """Send `report`, and wait until all machines that are alive have sent theirs. Return them
        all, or None after `deadline` (in the time of `time.monotonic`); without one wait as long as
        it takes, with a line every 10 s.
        """
        began = time.monotonic()
        self._asking = True
        self.heartbeats.asking(True)
        if self._knows_of_death or all(self._id < id for id in self._others):
            self._answer_for_absent()  # one machine is enough
        self._request = _Request(lambda: self._wait_for_quorum(report))
        try:
            while (quorum := self._request.answer(_until(deadline))) is None:
                waited = time.monotonic() - began
                if self.heartbeats.orphaned or (
                    deadline is not None and time.monotonic() >= deadline
                ):
                    return None
                if waited >= LINE_EVERY_S:
                    self._lines.say(
                        "%s has waited %.0f s for %s", report.name, waited, self._reason()
                    )
                if waited >= self._limit_s():
                    threading.Thread(target=self._call_those_that_hang, daemon=True).start()
        finally:
            self._asking = False
            self.heartbeats.asking(False)
        return quorum

    def step_aside(self) -> None:
        """Let the others go on without this machine until it asks again, under its next name."""
        name = self._name
        self._name = next_name(name)
        self.heartbeats.begin_again()
        self.heartbeats.pause()
        self._answer_for(name)
        self._answer_for_absent()  # the others may leave this to this machine

    def seen(self, reports: Sequence[Report]) -> None:
        """Must be called with the reports of the latest quorum."""
        self._others = {
            report.id: report.servers[0]
            for report in reports
            if report.servers and not report.left and report.id != self._id
        }
        self._knows_of_death = False
        self._watch.follow(self._others)

    def close(self) -> None:
        """Tell the others that they need not wait for this machine. Takes up to a second."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch.close()
        self.heartbeats.stop()
        self._post(self._name)
        # the next quorum also ends a request that nobody waits for any more
        if self._request is not None:
            self._request.answer(_POST_LIMIT_S)
        self._client = None  # it has threads and sockets, and `stats` may still need this object

    def _reason(self) -> str:
        place = urlsplit(self._address if "//" in self._address else f"//{self._address}").netloc
        if not listens(place):
            return f"the lighthouse at {self._address}, which does not answer"
        return "the other machines, which have not reached their outer step"

    def _wait_for_quorum(self, report: Report) -> Quorum | None:
        while not self._closed.is_set():
            try:
                # A request that ends too early would leave the others with a list of the dead.
                members = self._send(self._client, self._name, report, timedelta(days=1))
            except Exception:  # the lighthouse is gone: connect again when it is back
                self._closed.wait(_ASK_AGAIN_S)
                with contextlib.suppress(Exception):
                    self._client = self._new_client()
            else:
                self._check_secrets(report, [(id_of(name), data) for name, data in members])
                return self._read(members)
        return None

    def _check_secrets(self, report: Report, members: Quorum) -> None:
        self.refusal, lines = refusal(self._id, report.joined, self._key, members)
        for line in lines:
            self._lines.say("%s", line, about=line)

    def _read(self, members: Quorum) -> Quorum:
        """Return the quorum without reports that lack a proof of the secret, and with the ids of
        the machines in place of the names under which they have asked.
        """
        key = self._key
        if key is not None:
            members = [(name, data) for name, data in members if key.knows(id_of(name), data)]
        has_left = {
            name: isinstance(data, dict) and data.get("left") is True for name, data in members
        }
        if has_left.pop(self._name, False):
            # The others have declared this machine dead, and answer under this name.
            self._name = next_name(self._name)
            self.heartbeats.begin_again()
        self._absent.seen(has_left.items(), time.monotonic())
        return [(id_of(name), data) for name, data in members]

    def _send(self, client: Any, name: str, report: Report, limit: timedelta) -> Quorum:
        content = report.to_json()
        quorum = client.quorum(
            name,
            limit,
            address="" if report.left else self._server,
            store_address=self._store,
            step=report.step,
            world_size=1,
            data=content if self._key is None else self._key.sign_report(report.id, content),
        )
        return [(member.replica_id, member.data) for member in quorum.participants]

    # ---- machines that have left, died, or hang
    # ----------------------------------------------------------------------------------------------

    def has_died(self, id: str) -> None:
        """The process of another machine has ended."""
        name = self._absent.has_died(id, time.monotonic())
        self._knows_of_death = True
        if name is not None and self._asking:
            self._answer_for_absent()

    def _answer_for_absent(self) -> None:
        for name in self._absent.names(time.monotonic()):
            self._answer_for(name)

    def _answer_for(self, name: str) -> None:
        # No daemon: the process would abort if a thread came back from native code while the
        # interpreter ends. It takes up to `_POST_LIMIT_S`.
        threading.Thread(target=self._post, args=(name,), name="commhooks answer").start()

    def _post(self, name: str) -> None:
        """Put a report into the next quorum that says that the machine has left. Do not wait for
        the quorum.
        """
        report = Report(id=id_of(name), left=True)
        with contextlib.suppress(Exception):
            self._send(self._client, name, report, timedelta(seconds=_POST_LIMIT_S))

    def _call_those_that_hang(self) -> None:
        """Tell the machines of the latest quorum that this one has waited for long. The heartbeats
        of those that stand still then pause. Those that cannot answer are declared dead.
        """
        for id, server in list(self._others.items()):
            try:
                self._servers.ask(server, "waiting")
            except NETWORK_ERRORS as error:
                if isinstance(error, TimeoutError):
                    self.has_died(id)


def _until(deadline: float | None) -> float:
    return (
        _LOOK_EVERY_S
        if deadline is None
        else max(0.0, min(_LOOK_EVERY_S, deadline - time.monotonic()))
    )


class _Request:
    """Runs `work` in a thread until it returns, however long it takes."""

    def __init__(self, work: Callable[[], Quorum | None]) -> None:
        self._found: Quorum | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="commhooks quorum", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._found = self._work()

    def answer(self, limit_s: float) -> Quorum | None:
        self._thread.join(limit_s)
        return self._found
