"""The state that a machine serves: who reads it, how long it stays, and what may go wrong. In one
process.
"""

import os
import runpy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.members import state_server
from commhooks.members.state_server import (
    NETWORK_ERRORS,
    NoState,
    StateServer,
    ask,
    fetch,
    has_read,
    host_and_port,
)

TENSORS = [torch.arange(6.0).view(2, 3), torch.tensor(7), torch.zeros(0)]


@pytest.fixture
def server() -> Iterator[Callable[..., StateServer]]:
    made: list[StateServer] = []

    def new(limit_s: float = 60.0, host: str = "127.0.0.1", **given: Any) -> StateServer:
        made.append(StateServer(host, limit_s, **{"status": lambda: {"id": "a:1"}} | given))
        return made[-1]

    yield new
    for each in made:
        each.close()


def eventually(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_the_state_arrives_and_is_freed_when_all_have_read_it(
    server: Callable[..., StateServer], host: str
) -> None:
    served = server(host=host)
    given = [tensor.clone() for tensor in TENSORS]
    served.serve(3, b"a form", given, ["b:1", "c d:2"])
    given[0].zero_()  # the training goes on
    form, read = fetch(served.address, 3, 1.0)
    arrived = [torch.full_like(tensor, 9) for tensor in TENSORS]
    for number, tensor in enumerate(arrived):
        read(number, tensor)
    assert form == b"a form" and all(map(torch.equal, arrived, TENSORS))
    has_read(served.address, 3, "b:1")
    assert served.serving
    has_read(served.address, 3, "c d:2")
    eventually(lambda: not served.serving)


def test_a_state_that_nobody_reads_is_freed(server: Callable[..., StateServer]) -> None:
    served = server(limit_s=0.2)
    served.serve(3, b"", TENSORS, ["b:1"])
    eventually(lambda: not served.serving)


def test_a_state_of_another_step_is_waited_for_until_the_limit(
    server: Callable[..., StateServer],
) -> None:
    served = server()
    served.serve(3, b"", TENSORS, ["b:1"])
    with pytest.raises(
        OSError, match="it has not served the state of outer step 4 within 0.2 s"
    ) as late:
        fetch(served.address, 4, 0.2)
    assert not isinstance(late.value, NoState), "so that another machine is asked next"
    began = time.monotonic()
    with pytest.raises(NoState, match="it has no state of outer step 4"):
        fetch(served.address, 4, 60.0, lambda: False)
    assert time.monotonic() - began < 5.0, "the machine has moved on"
    threading.Timer(0.3, served.serve, (4, b"later", TENSORS, ["b:1"])).start()
    assert fetch(served.address, 4, 5.0)[0] == b"later"


def test_a_proxy_of_the_environment_is_not_used(server: Callable[..., StateServer]) -> None:
    served = server()
    served.serve(3, b"form", TENSORS, ["b:1"])
    with mock.patch.dict(
        os.environ, http_proxy="http://127.0.0.1:1", HTTP_PROXY="http://127.0.0.1:1", no_proxy=""
    ):
        # as in a process that starts with this environment
        loaded = runpy.run_path(state_server.__file__)
        assert loaded["fetch"](served.address, 3, 1.0)[0] == b"form"
        assert loaded["ask"](served.address) == {"id": "a:1"}


def test_a_reader_that_gives_up_leaves_no_traceback(
    server: Callable[..., StateServer], capfd: pytest.CaptureFixture[str]
) -> None:
    served = server()
    served.serve(3, b"", [torch.zeros(2**24)], ["b:1"])
    for _ in range(3):
        with socket.create_connection(host_and_port(served.address)) as reader:
            reader.sendall(b"GET /state/3/0 HTTP/1.0\r\n\r\n")
            reader.recv(10)
    eventually(
        lambda: not any("process_request" in thread.name for thread in threading.enumerate())
    )
    assert capfd.readouterr().err == ""


def test_questions(server: Callable[..., StateServer]) -> None:
    waited = []
    served = server(waited_for=lambda: waited.append(1))
    assert ask(served.address) == {"id": "a:1"} and not waited
    assert ask(served.address, "waiting") == {"id": "a:1"} and waited


@pytest.mark.parametrize(
    "path",
    ["", "/", "state", "state/3", "state/3/-1", "state/3/3", "state/x/form", "../etc/passwd"],
)
def test_other_paths_are_not_found(server: Callable[..., StateServer], path: str) -> None:
    served = server()
    served.serve(3, b"", TENSORS, ["b:1"])
    with pytest.raises(NETWORK_ERRORS, match="404"):
        ask(served.address, path)


def test_a_server_of_something_else_is_no_machine() -> None:
    for content in (b"<html>", b"[1]"):
        with mock.patch.object(state_server._opener, "open") as opened:
            opened.return_value.__enter__.return_value.read.return_value = content
            with pytest.raises(OSError, match="host:1 is no machine of a training"):
                ask("host:1")
