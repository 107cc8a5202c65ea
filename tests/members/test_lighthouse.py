"""What machines and a real lighthouse of torchft do together, in one process: quorums, leaving,
hanging, strangers.
"""

import contextlib
import ctypes
import dataclasses
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torchft", reason="torchft is not installed")

from torchft.coordination import LighthouseClient, LighthouseServer

from commhooks.errors import CommandError, HookRunError
from commhooks.members.client import Client
from commhooks.members.lighthouse import Absent, Lighthouse, id_of, next_name
from commhooks.members.lines import Lines
from commhooks.members.peers import Connections
from commhooks.members.quorum import read_all
from commhooks.members.report import Report
from commhooks.members.secret import Key
from commhooks.members.state_server import StateServer
from commhooks.members.status_page import machines_at
from commhooks.tools.machines import Row, ask_all

DEAD_S = 5.0


class Simulated:
    """The lighthouse client and state server of a machine, in this process."""

    def __init__(self, address: str, name: str, timeout_s: float, key: Key | None = None) -> None:
        self.id, self.number = f"{name}:1", 0
        status = {"id": self.id, "numbers": {"round": 3}}
        self.server = StateServer(
            "127.0.0.1", lambda: 60.0, lambda: status, self.waited_for, key=key
        )
        self.lighthouse = Lighthouse(
            address,
            self.id,
            self.server.address,
            "127.0.0.1:1",
            lambda: timeout_s,
            Lines(logs=True),
            key,
        )
        heartbeats = self.lighthouse.heartbeats
        self.passes = 0
        heartbeats.passes = lambda: self.passes

    def waited_for(self) -> None:
        self.lighthouse.heartbeats.waited_for()

    def ask(self, limit_s: float | None = 20.0) -> list[Report] | None:
        self.number += 1
        report = Report(id=self.id, number=self.number, servers=(self.server.address,))
        deadline = None if limit_s is None else time.monotonic() + limit_s
        quorum = self.lighthouse.quorum(report, deadline)
        if quorum is None:
            return None
        reports, _ = read_all(quorum)
        self.lighthouse.seen(reports)
        return reports

    def close(self) -> None:
        self.lighthouse.close()
        self.server.close()


@pytest.fixture
def dead_s() -> float:
    """After how many seconds without a heartbeat the lighthouse declares a machine dead."""
    return DEAD_S


long_alive = pytest.mark.parametrize("dead_s", [60.0])
soon_dead = pytest.mark.parametrize("dead_s", [2.0])


@pytest.fixture
def machine(dead_s: float) -> Iterator[Callable[..., Simulated]]:
    times = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": int(1000 * dead_s)}
    server = LighthouseServer("127.0.0.1:0", 1, quorum_tick_ms=50, **times)
    address = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    made: list[Simulated] = []

    def new(name: str, timeout_s: float = 60.0, key: Key | None = None) -> Simulated:
        made.append(Simulated(address, name, timeout_s, key))
        return made[-1]

    new.address = address  # type: ignore[attr-defined]
    yield new
    for each in made:
        each.close()
    server.shutdown()


def heartbeats(machine: Callable[..., Simulated]) -> dict[str, float]:
    """Return the seconds since the latest heartbeat of each machine, by id."""
    with urllib.request.urlopen(f"{machine.address}/status") as page:  # type: ignore[attr-defined]
        text = page.read().decode()
    return {id: float(age) for id, age in re.findall(r"(\S+): seen (\S+)s ago", text)}


def eventually(met: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(machine: Callable[..., Simulated], ids: str, **given: Any) -> list[Simulated]:
    """Make machines, and wait until the lighthouse has heard of all, so that each is waited for."""
    made = [machine(name, **given) for name in ids]
    eventually(lambda: {each.id for each in made} <= heartbeats(machine).keys())
    return made


def together(*machines: Simulated) -> list[list[Report] | None]:
    answers: list[Any] = [None] * len(machines)

    def run(place: int, each: Simulated) -> None:
        answers[place] = each.ask()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def names(reports: list[Report] | None) -> str:
    return "".join(sorted(report.name + "!" * report.left for report in reports or []))


def test_all_get_the_same_quorum(machine: Callable[..., Simulated]) -> None:
    a, b = alive(machine, "ab")
    assert list(map(names, together(a, b))) == ["ab", "ab"]


@long_alive
def test_nobody_waits_for_a_machine_that_has_left(machine: Callable[..., Simulated]) -> None:
    """Not in any of the next quorums, while the lighthouse still takes it for alive."""
    a, b, c = alive(machine, "abc")
    assert list(map(names, together(a, b, c))) == ["abc"] * 3
    b.lighthouse.close()
    b.server.close()
    began = time.monotonic()
    for _ in range(4):
        assert list(map(names, together(a, c))) == ["ab!c", "ab!c"]
    assert time.monotonic() - began < 2.0


@soon_dead
def test_a_machine_that_has_left_is_forgotten_when_rounds_are_long(
    machine: Callable[..., Simulated], dead_s: float
) -> None:
    a, b = alive(machine, "ab")
    together(a, b)
    b.lighthouse.close()
    eventually(lambda: heartbeats(machine).get(b.id, dead_s) >= dead_s)
    assert names(a.ask()) == "a"


@soon_dead
def test_a_machine_whose_training_does_not_move_is_left_out(
    machine: Callable[..., Simulated], caplog: pytest.LogCaptureFixture
) -> None:
    """Its heartbeats go on, and the lighthouse gives no quorum to one of two."""
    a, b = alive(machine, "ab", timeout_s=1.0)
    together(a, b)
    began = time.monotonic()
    assert names(a.ask(30.0)) == "a"
    assert time.monotonic() - began < 1.0 + DEAD_S + 4.0
    assert "the others go on without this machine, whose training has not moved for" in caplog.text
    back = threading.Thread(target=b.ask)
    back.start()
    while names(a.ask()) != "ab":  # with its next request
        assert time.monotonic() - began < 20
    back.join()


@soon_dead
def test_a_machine_whose_training_moves_is_waited_for(
    machine: Callable[..., Simulated], dead_s: float
) -> None:
    a, b = alive(machine, "ab", timeout_s=2.0)
    together(a, b)
    moving = threading.Event()

    def move() -> None:
        while not moving.wait(0.1):
            b.passes += 1

    thread = threading.Thread(target=move)
    thread.start()
    assert a.ask(2.0 + dead_s + 1.0) is None, "the time is over"
    moving.set()
    thread.join()


def test_what_another_job_sends_is_ignored(machine: Callable[..., Simulated]) -> None:
    (a,) = alive(machine, "a")
    contents: list[Any] = [None, {"commhooks": "x"}, {"step": 1, "record": {}}]
    new_client = lambda: LighthouseClient(machine.address, timedelta(seconds=5))  # type: ignore[attr-defined]  # noqa: E731
    clients = [new_client() for _ in contents]
    for number, client in enumerate(clients):  # so that all are in one quorum
        client.heartbeat(f"other_{number}:9")
    for number, (client, content) in enumerate(zip(clients, contents, strict=True)):
        ask = {"address": "x", "store_address": "y", "step": 3, "world_size": 1, "data": content}
        threading.Thread(target=_quorum_of, args=(client, f"other_{number}:9", ask)).start()
    report = Report(id=a.id, servers=(a.server.address,))
    quorum = a.lighthouse.quorum(report, time.monotonic() + 20)
    assert quorum is not None
    reports, strangers = read_all(quorum)
    assert reports == [report]
    assert sorted(strangers) == [f"'other_{number}:9' of another job" for number in range(3)]


@long_alive
def test_a_machine_that_has_died_is_not_waited_for(machine: Callable[..., Simulated]) -> None:
    """Its heartbeats still count, but its sockets are closed."""
    a, b, c = alive(machine, "abc")
    together(a, b, c)
    b.server.close()
    began = time.monotonic()
    for _ in range(3):
        assert list(map(names, together(a, c))) == ["ab!c", "ab!c"]
    assert time.monotonic() - began < 4.0


@long_alive
@pytest.mark.parametrize("goes", ["leaves", "dies", "steps aside"])
def test_the_first_machine_answers_for_the_absent_until_it_is_absent(
    machine: Callable[..., Simulated], goes: str
) -> None:
    """So that an outer step is not slower because many machines have left before."""
    a, b, c, d = alive(machine, "abcd")
    together(a, b, c, d)
    d.close()
    together(a, b, c)
    answered = []
    for other in (a, b, c):
        post = other.lighthouse._post
        other.lighthouse._post = lambda name, other=other, post=post: (  # type: ignore[method-assign]
            answered.append((other.id, name)),
            post(name),
        )
    assert list(map(names, together(a, b, c))) == ["abcd!"] * 3
    assert answered == [("a:1", "d:1")]
    began = time.monotonic()
    if goes == "steps aside":
        a.lighthouse.step_aside()
    elif goes == "leaves":
        a.close()
    else:
        a.server.close()
    for _ in range(3):
        assert list(map(names, together(b, c))) == ["a!bcd!"] * 2
    assert time.monotonic() - began < 4.0
    assert ("c:1", "d:1") not in answered[-2:]


def test_a_process_ends_after_what_it_answers_for_another(
    machine: Callable[..., Simulated],
) -> None:
    """A thread that comes back from native code while the interpreter ends aborts the process. So
    the interpreter waits for it.
    """
    a, _ = alive(machine, "ab")  # the lighthouse waits for b
    post, go_on = a.lighthouse._post, threading.Event()
    a.lighthouse._post = lambda name: (go_on.wait(), post(name))  # type: ignore[method-assign]
    a.lighthouse._answer_for("c:1")
    (answering,) = (thread for thread in threading.enumerate() if thread.name == "commhooks answer")
    assert not answering.daemon
    go_on.set()
    answering.join(30.0)
    assert not answering.is_alive()


def test_a_machine_that_was_declared_dead_wrongly_comes_back(
    machine: Callable[..., Simulated],
) -> None:
    """Once only: its sockets then no longer count against it."""
    a, b = alive(machine, "ab")
    together(a, b)
    a.lighthouse.has_died(b.id)
    assert names(a.ask()) == "ab!"
    ended = threading.Event()

    def train() -> None:
        while not ended.is_set():
            b.ask(5.0)

    thread = threading.Thread(target=train)
    thread.start()
    began = time.monotonic()
    while "b" not in names(a.ask()).replace("b!", "") or b.lighthouse._name == b.id:
        assert time.monotonic() - began < 10
    for _ in range(3):
        a.lighthouse.has_died(b.id)
        assert "b" in names(a.ask()).replace("b!", "")
    ended.set()
    while thread.is_alive():
        a.ask(0.5)


def test_heartbeats_do_not_need_the_gil(machine: Callable[..., Simulated]) -> None:
    a = machine("a")
    assert names(a.ask()) == "a"
    asked = time.monotonic()
    eventually(lambda: time.monotonic() - asked > heartbeats(machine)[a.id])  # one has come
    ctypes.PyDLL(None).usleep(1_500_000)  # holds the GIL, unlike CDLL
    (listed,) = machines_at(machine.address)  # type: ignore[attr-defined]
    assert (listed.id, listed.server) == (a.id, a.server.address)
    assert listed.heartbeat_s < 1.0


def test_whom_a_machine_answers_for() -> None:
    absent = Absent()
    absent.seen([("a:1", False), ("b:1", True), ("c#x:1", False)], now=10.0)
    absent.seen([("b:1", True)], now=14.0)
    assert absent.names(19.9) == ["b:1"], "the lighthouse declares it alive since the answer"
    assert absent.names(20.1) == []
    assert absent.has_died("c#x:1", now=21.0) == "c#x:1" and absent.names(26.9) == ["c#x:1"]
    again = next_name("c#x:1")
    assert again == "c#x:1#1" and next_name(again) == "c#x:1#2" and id_of(again) == "c#x:1"
    absent.seen([(again, False)], now=22.0)
    assert absent.has_died("c#x:1", now=23.0) is None, "it was wrong before"


def test_the_page_of_the_lighthouse_says_that_others_train(
    machine: Callable[..., Simulated],
) -> None:
    """So a machine that starts is not waited for before its first request."""
    a, b = machine("a"), machine("b")
    assert not a.lighthouse._others_train()
    assert names(a.ask()) == "a"
    eventually(b.lighthouse._others_train)


def test_the_machines_of_a_run_are_shown(machine: Callable[..., Simulated]) -> None:
    """Those of the latest quorum, to who knows their secret."""
    assert ask_all(machine.address, Client()) == []  # type: ignore[attr-defined]
    key = Key("correct horse battery")
    a, b = alive(machine, "ab", key=key)
    assert list(map(names, together(a, b))) == ["ab", "ab"]
    b.lighthouse.close()
    assert names(a.ask()) == "ab!"
    assert ask_all(machine.address, Client(key)) == [Row("a", {"round": 3})]  # type: ignore[attr-defined]
    (row,) = ask_all(machine.address, Client())  # type: ignore[attr-defined]
    assert row.numbers is None and "has no proof of the secret" in row.failure
    with pytest.raises(CommandError, match="the lighthouse at http://127.0.0.1:1 does not answer"):
        ask_all("http://127.0.0.1:1", Client())


def test_a_report_without_the_secret_does_not_count(machine: Callable[..., Simulated]) -> None:
    (a,), (b,) = alive(machine, "a", key=Key("correct horse battery")), alive(machine, "b")
    assert list(map(names, together(a, b))) == ["a", "ab"]
    assert not a.lighthouse.refusal
    assert "machine b has no secret, and machine a has one" in b.lighthouse.refusal


def _quorum_of(client: Any, id: str, ask: dict[str, Any]) -> None:
    with contextlib.suppress(RuntimeError, TimeoutError):  # the lighthouse ends
        client.quorum(id, timedelta(seconds=20), **ask)


def connections(
    name: str, timeout_s: float = 60.0, status: Any = None, key: Key | None = None
) -> tuple[Connections, StateServer, Report]:
    import torch

    made = Connections(f"{name}:1", 0, torch.device("cpu"), lambda: timeout_s, Client(key))
    server = StateServer("127.0.0.1", lambda: 60.0, status or made.status, key=key)
    return made, server, Report(id=f"{name}:1", servers=(server.address,), store=server.address)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({"id": "b:1", "failed": ["X"]}, "b has given up the exchange"),
        ({"id": "b:1", "number": 1}, "b has asked for the machines again"),
        ({"id": "c:1", "connecting": "X"}, "b at .* does not answer"),
        ({"id": "b:1", "connecting": "Y"}, "b did not come to connect"),
    ],
)
def test_who_does_not_come_is_not_waited_for(status: dict[str, Any], sentence: str) -> None:
    """A machine knows at once that another one will not connect, and waits for one that may only
    until the limit. No thread stays behind in native code.
    """
    a, server, own = connections("a")
    _, other, report = connections("b", status=lambda: status)
    threads = set(threading.enumerate())
    began = time.monotonic()
    with pytest.raises(OSError, match=sentence):
        a.connect([own, report], "X", 1.0)
    assert time.monotonic() - began < 3.0
    assert not {
        each for each in set(threading.enumerate()) - threads if "process_request" not in each.name
    }
    answers = a.all_answer([own, report])
    assert answers == ("c:1" not in status.values()) and (report.id in a.unreachable) == (
        not answers
    )
    for each in (server, other):
        each.close()
    a.close()


def test_a_machine_that_hangs_in_an_exchange_is_waited_for_up_to_the_limit() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    machines = [connections(name) for name in "ab"]
    reports = [
        dataclasses.replace(report, store=f"127.0.0.1:{store.port}") for *_, report in machines
    ]
    (a, *_), (b, *_) = machines
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda machine: machine.connect(reports, "X", 20.0), (a, b)))
    a.limit(0.3)
    began = time.monotonic()
    with pytest.raises(HookRunError, match="confirmation"):
        a.confirm()  # b does not
    assert time.monotonic() - began < 10.0
    for made, server, _ in machines:
        made.close()
        server.close()


def test_an_error_says_why_a_machine_does_not_answer() -> None:
    """A machine that is refused, as by one whose clock differs, finds the reason in its own log."""
    a, server, own = connections("a", key=Key("a" * 16))
    _, other, report = connections("b", key=Key("b" * 16))
    with pytest.raises(OSError, match=r"b at \S+ does not answer \(.* refuses this machine: the"):
        a.check([own, report], "X")
    other.close()
    with pytest.raises(OSError, match=r"b at \S+ does not answer \(.*Connection refused"):
        a.check([own, report], "X")
    for each in (server, a):
        each.close()


def test_a_machine_that_answers_again_is_no_longer_unreachable() -> None:
    current = {"id": "c:1"}
    a, server, own = connections("a")
    _, other, report = connections("b", status=lambda: current)
    assert not a.all_answer([own, report]) and "b:1" in a.unreachable
    current["id"] = "b:1"
    eventually(lambda: not a.unreachable)
    assert not a.all_answer([own, report], ["b:1"]), "its store did not answer"
    a.forget([own])
    assert not a.unreachable
    for each in (server, other):
        each.close()
    a.close()
