"""The end of a process is seen at its sockets; a process that stands still is not dead."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commhooks.members.client import Client
from commhooks.members.state_server import StateServer
from commhooks.members.watch import Watch
from tests.support import warm
from tests.support.repository import PYTHONPATH

_MACHINE = """
import os, sys, time
from commhooks.members.state_server import StateServer
server = StateServer("127.0.0.1", lambda: 60.0, lambda: {"id": "a:1"})
print(server.address, flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:  # a worker of a DataLoader, which outlives the machine
    time.sleep(30)
print(os.getpid(), child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def machine() -> Iterator["subprocess.Popen[str]"]:
    command = [warm.python("commhooks.members.state_server"), "-c", _MACHINE]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def eventually(met: Callable[[], bool], limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not met() and time.monotonic() < deadline:
        time.sleep(0.02)
    return met()


class Watched:
    """A watch of the machine a at `server`."""

    def __init__(self, server: str) -> None:
        self.died = list[str]()
        self.opened = 0
        self.watch = Watch(self.died.append, self._open)
        self.watch.follow({"a:1": server})
        assert eventually(lambda: self.opened == 1)

    def _open(self, machine: str, server: str) -> socket.socket:
        connection = Client().watch(machine, server)
        self.opened += 1
        return connection


def test_a_process_that_was_killed_is_dead_at_once(machine: "subprocess.Popen[str]") -> None:
    """Also if it has forked one that lives; while it stands still, it is not."""
    assert machine.stdin is not None and machine.stdout is not None
    watched = Watched(machine.stdout.readline().strip())
    print("go on", file=machine.stdin, flush=True)
    pid, child = map(int, machine.stdout.readline().split())
    time.sleep(0.3)
    os.kill(pid, signal.SIGSTOP)
    assert not eventually(lambda: bool(watched.died), 1.5)
    os.kill(pid, signal.SIGKILL)
    try:
        assert eventually(lambda: watched.died == ["a:1"])
        os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)
    watched.watch.close()


def test_both_ends_notice_in_the_end_that_the_other_host_is_gone() -> None:
    server = StateServer("127.0.0.1", lambda: 60.0, lambda: {"id": "a:1"})
    connection = Client().watch("a:1", server.address)
    ports = {server.address.rpartition(":")[2], str(connection.getsockname()[1])}

    def timers() -> list[str]:
        """The kind of the timer of each end, in Linux; 02 is that of keepalive."""
        ends = map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
        return [end[5][:2] for end in ends if set(map(_port, end[1:3])) == ports]

    deadline = time.monotonic() + 10.0
    while timers() != ["02", "02"]:
        assert time.monotonic() < deadline, timers()
        time.sleep(0.02)
    connection.close()
    server.close()


def _port(address: str) -> str:
    return str(int(address.rpartition(":")[2], 16))


def test_a_connection_that_breaks_is_no_death() -> None:
    """The machine takes another connection."""
    opened = list[socket.socket]()

    def connect(machine: str, server: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        opened.append(theirs)
        return ours

    died = list[str]()
    watch = Watch(died.append, connect)
    watch.follow({"a:1": "somewhere"})
    for number in (1, 2, 3):
        assert eventually(lambda n=number: len(opened) >= n)  # type: ignore[misc]
        opened[-1].close()
    watch.close()
    assert not died


def test_a_host_that_does_not_answer_is_no_death() -> None:
    calls = list[str]()

    def connect(machine: str, server: str) -> socket.socket:
        calls.append(machine)
        raise OSError("no route to host")

    died = list[str]()
    watch = Watch(died.append, connect)
    watch.follow({"a:1": "somewhere"})
    assert eventually(lambda: bool(calls))
    time.sleep(0.3)
    watch.close()
    assert not died
