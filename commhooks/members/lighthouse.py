"""Talk to a lighthouse of torchft: heartbeats, and the quorum of the machines that are alive.

torchft 0.2: `torchft.coordination` is its public low-level interface. Its `Manager` is not used,
because it sends the state of a machine that joins while the others wait, and gives up the work of a
step that failed.

The lighthouse gives a list (the quorum) to all machines at once, when all those have asked that it
takes for alive: a heartbeat or request has come from them in the last 5 s. It leaves out machines
that have not asked after `--wait-s`, but not if half or more of all have not. Nobody can tell it
that a machine has left.
"""

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from commhooks.errors import AttachError, HookConfigError
from commhooks.members.lines import LINE_EVERY_S, Lines
from commhooks.members.report import Report, is_loopback
from commhooks.members.state_server import NETWORK_ERRORS, ask

VARIABLE = "TORCHFT_LIGHTHOUSE"
_HEARTBEAT_S = 0.5
_HEARTBEAT_LIMIT_S = 5.0
_ANSWERED_FOR_S = 6.0
"""A machine that has left counts as alive for 5 s more, in which the others answer for it."""
_POST_LIMIT_S = 0.5
_LOOK_EVERY_S = 1.0
_SIOCGIFADDR = 0x8915

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
    if address := given or os.environ.get(VARIABLE, ""):
        return address
    raise HookConfigError(
        f"members without a lighthouse: set {VARIABLE}=http://host:29510 to the address that"
        " `commhooks lighthouse` prints, or give commhooks.Torchft(lighthouse=...)"
    )


def own_host(lighthouse: str) -> str:
    """Return the address of the interface through which this machine reaches the lighthouse. Raises
    AttachError.
    """
    parts = urlsplit(lighthouse if "//" in lighthouse else f"//{lighthouse}")
    try:
        return _host_towards(parts.hostname or "", parts.port or 80)
    except (OSError, ValueError) as error:
        raise AttachError(
            f"members: the lighthouse {lighthouse} cannot be found: {error}"
        ) from error


def host_for_others() -> str:
    """Return an address of this machine at which other machines may reach it, else its host
    name.
    """
    for outside in ("192.0.2.1", "2001:db8::1"):  # addresses of nobody, reserved for documentation
        with contextlib.suppress(OSError):
            return _host_towards(outside, 80)
    others = (host for host in interfaces().values() if not is_loopback(host))
    return next(others, socket.gethostname())


def _host_towards(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return f"[{own}]" if ":" in own else own


def interfaces() -> dict[str, str]:
    """Return the network interfaces of this machine that have an IPv4 address, by name. Linux
    only.
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


class Heartbeats:
    """Sends heartbeats from a thread until `stop`, or until the process ends.

    They pause if another machine waits for this one, whose training has not moved for `limit_s`
    (`waited_for`), and before the first request after `limit_s`. They go on with the next request
    (`asking(True)`).

    Attributes:
        passes: returns the number of backward passes so far.
        reached: whether the lighthouse has answered the latest heartbeat.
        orphaned: whether the torchrun that has started this process is gone.
    """

    def __init__(
        self, id: str, limit_s: float, new_client: Callable[[], Any], lines: Lines
    ) -> None:
        self.passes: Callable[[], int] = lambda: 0
        self.reached, self.orphaned = True, False
        self._limit_s, self._lines = limit_s, lines
        self._moved_at, self._asking, self._has_asked, self._paused = (
            time.monotonic(),
            False,
            False,
            False,
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, args=(id, new_client), name="commhooks heartbeat", daemon=True
        )
        self._thread.start()
        # The process would abort if a thread came back from the native client while the interpreter
        # ends.
        weakref.finalize(self, _stop, self._stopped, self._thread)

    def _beat(self, id: str, new_client: Callable[[], Any]) -> None:
        client, passes, parent = None, self.passes(), os.getppid()
        started_by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        while not self._stopped.wait(_HEARTBEAT_S):
            if self.passes() != passes or self._asking:
                passes, self._moved_at = self.passes(), time.monotonic()
            self.orphaned = started_by_torchrun and os.getppid() != parent
            hangs_at_start = not self._has_asked and self._stands_still()
            if self._paused or self.orphaned or hangs_at_start:
                continue
            try:
                client = client or new_client()
                client.heartbeat(id, timedelta(seconds=_HEARTBEAT_LIMIT_S))
                self.reached = True
            except Exception:  # torchft raises RuntimeError and TimeoutError
                self.reached, client = False, None

    def _stands_still(self) -> bool:
        return not self._asking and time.monotonic() > self._moved_at + self._limit_s

    def asking(self, now: bool) -> None:
        """Must be called when this machine begins to wait for a quorum, and when it has ended."""
        self._asking, self._has_asked = now, True
        self._moved_at, self._paused = time.monotonic(), False

    def waited_for(self) -> None:
        """Another machine has waited for this one for too long."""
        if self._stands_still() and not self._paused:
            self._paused = True
            self._lines.say(
                "the others go on without this machine, whose training has not moved for %.0f s",
                time.monotonic() - self._moved_at,
            )

    def stop(self) -> None:
        self._stopped.set()


def _stop(stopped: threading.Event, thread: threading.Thread) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(_HEARTBEAT_LIMIT_S + 1)


class Lighthouse:
    """Connects this machine with the lighthouse, from one rank.

    Args:
        address: of the lighthouse.
        id: of this machine.
        store: the address of this machine's store.

    Raises:
        AttachError: it does not answer within `timeout_s`.
    """

    def __init__(self, address: str, id: str, store: str, timeout_s: float, lines: Lines) -> None:
        from torchft.coordination import LighthouseClient

        self._address, self._id, self._store, self._limit_s, self._lines = (
            address,
            id,
            store,
            timeout_s,
            lines,
        )
        # machines that have left -> when they were last in a quorum
        self._left: dict[str, float] = {}
        self._others: list[str] = []  # the servers of the others in the latest quorum
        self._request: _Request | None = None
        self._closed = threading.Event()
        self._new_client: Callable[[], Any] = lambda: LighthouseClient(
            address, timedelta(seconds=timeout_s)
        )
        try:
            self._client = self._new_client()
        except Exception as error:  # torchft raises RuntimeError and TimeoutError
            raise AttachError(
                f"members: the lighthouse at {address} did not answer within {timeout_s:g} s; start"
                f" it by `commhooks lighthouse`, or correct {VARIABLE} ({error})"
            ) from error
        self.heartbeats = Heartbeats(id, timeout_s, self._new_client, lines)

    def quorum(self, report: Report, deadline: float | None) -> Quorum | None:
        """Send `report`, and wait until all machines that are alive have sent theirs. Return them
        all, or None after `deadline` (in the time of `time.monotonic`); without one wait as long as
        it takes, with a line every 10 s.
        """
        began = time.monotonic()
        self._answer_for_those_who_left()
        self.heartbeats.asking(True)
        self._request = _Request(lambda: self._wait_for_quorum(report))
        try:
            while (found := self._request.answer(_until(deadline))) is None:
                waited = time.monotonic() - began
                if self.heartbeats.orphaned or (
                    deadline is not None and time.monotonic() >= deadline
                ):
                    return None
                if waited >= LINE_EVERY_S:
                    self._lines.say(
                        "%s has waited %.0f s for %s", report.name, waited, self._reason()
                    )
                if waited >= self._limit_s:
                    threading.Thread(target=self._call_those_that_hang, daemon=True).start()
        finally:
            self.heartbeats.asking(False)
        return found

    def seen(self, reports: Sequence[Report]) -> None:
        """Must be called with the reports of the latest quorum."""
        now = time.monotonic()
        self._left |= {report.id: now for report in reports if report.left}
        self._others = [
            report.servers[0] for report in reports if report.servers and report.id != self._id
        ]

    def close(self) -> None:
        """Tell the others that they need not wait for this machine. Takes up to a second."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.heartbeats.stop()
        self._post(self._id)
        # the next quorum also ends a request that nobody waits for any more
        if self._request is not None:
            self._request.answer(_POST_LIMIT_S)

    def _reason(self) -> str:
        if not self.heartbeats.reached:
            return f"the lighthouse at {self._address}, which does not answer"
        return "the other machines, which have not reached their outer step"

    def _wait_for_quorum(self, report: Report) -> Quorum | None:
        while not self._closed.is_set():
            try:
                # A request that ends too early would leave the others with a list of the dead.
                return self._send(self._client, report, timedelta(days=1))
            except Exception:  # the lighthouse is gone: connect again when it is back
                self._closed.wait(_HEARTBEAT_S)
                with contextlib.suppress(Exception):
                    self._client = self._new_client()
        return None

    def _send(self, client: Any, report: Report, limit: timedelta) -> Quorum:
        quorum = client.quorum(
            report.id,
            limit,
            address=report.id,
            store_address=self._store,
            step=report.step,
            world_size=1,
            data=report.to_json(),
        )
        return [(member.replica_id, member.data) for member in quorum.participants]

    # ---- machines that have left, and machines that hang
    # -------------------------------------------------------------

    def _answer_for_those_who_left(self) -> None:
        now = time.monotonic()
        self._left = {id: at for id, at in self._left.items() if now < at + _ANSWERED_FOR_S}
        for id in self._left:
            threading.Thread(target=self._post, args=(id,), daemon=True).start()

    def _post(self, id: str) -> None:
        """Put a report into the next quorum that says that the machine `id` has left. Do not wait
        for the quorum.
        """
        with contextlib.suppress(Exception):
            self._send(self._client, Report(id=id, left=True), timedelta(seconds=_POST_LIMIT_S))

    def _call_those_that_hang(self) -> None:
        """Tell the machines of the latest quorum that this one has waited for long. The heartbeats
        of those that stand still then pause.
        """
        for server in self._others:
            with contextlib.suppress(*NETWORK_ERRORS):
                ask(server, "waiting")


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
