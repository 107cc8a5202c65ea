"""The state that a machine serves: who reads it, how long it stays, and what may go wrong. In one
process.
"""

import http.server
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

from commhooks.members import client as client_module
from commhooks.members.client import NETWORK_ERRORS, Client, NoState, host_and_port
from commhooks.members.secret import Key
from commhooks.members.state_server import StateServer

client = Client()
TENSORS = [torch.arange(6.0).view(2, 3), torch.tensor(7), torch.zeros(0)]


@pytest.fixture
def server() -> Iterator[Callable[..., StateServer]]:
    made: list[StateServer] = []

    def new(limit_s: float = 60.0, host: str = "127.0.0.1", **given: Any) -> StateServer:
        made.append(StateServer(host, lambda: limit_s, **{"status": lambda: {"id": "a:1"}} | given))
        return made[-1]

    yield new
    for each in made:
        each.close()


def eventually(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("host", "keys"),
    [("127.0.0.1", [None, None]), ("[::1]", [None, None]), ("127.0.0.1", [Key("a"), Key("a")])],
)
def test_the_state_arrives_and_is_freed_when_all_have_read_it(
    server: Callable[..., StateServer], host: str, keys: list[Key | None]
) -> None:
    served, client = server(host=host, key=keys[0]), Client(keys[1])
    given = [tensor.clone() for tensor in TENSORS]
    served.serve(3, b"a form", given, ["b:1", "c d:2"])
    given[0].zero_()  # the training goes on
    form, read = client.fetch(served.address, 3, 30.0)
    arrived = [torch.full_like(tensor, 9) for tensor in TENSORS]
    for number, tensor in enumerate(arrived):
        read(number, tensor)
    assert form == b"a form" and all(map(torch.equal, arrived, TENSORS))
    client.has_read(served.address, 3, "b:1")
    assert served.serving
    client.has_read(served.address, 3, "c d:2")
    eventually(lambda: not served.serving)


@pytest.mark.parametrize("limit_s", [60.0, 0.2])
def test_a_transfer_pauses_during_an_exchange_but_not_so_long_that_the_reader_gives_up(
    server: Callable[..., StateServer], limit_s: float
) -> None:
    served, state = server(limit_s), torch.arange(2.0**18)
    served.serve(3, b"a form", [state], ["b:1"])
    _, read = client.fetch(served.address, 3, 30.0)
    arrived = torch.zeros_like(state)
    reader = threading.Thread(target=read, args=(0, arrived))
    with served.pausing():
        reader.start()
        reader.join(1.0 if limit_s == 60.0 else 30.0)
        assert reader.is_alive() == (limit_s == 60.0)
    reader.join(30.0)
    assert torch.equal(arrived, state)


def test_a_machine_that_comes_while_another_one_reads_gets_the_same_copy(
    server: Callable[..., StateServer],
) -> None:
    """A new copy would end the transfer of the first one. It catches up from the older state."""
    served = server()
    assert not served.serve_also(4, ["c:1"])
    served.serve(3, b"a form", TENSORS, ["b:1"])
    _, read = client.fetch(served.address, 3, 30.0)
    assert served.serve_also(5, ["c:1"])
    assert client.fetch(served.address, 5, 30.0)[0] == b"a form"
    read(0, torch.empty(2, 3))
    client.has_read(served.address, 3, "b:1")
    assert served.serving
    client.has_read(served.address, 5, "c:1")
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
        client.fetch(served.address, 4, 0.2)
    assert not isinstance(late.value, NoState), "so that another machine is asked next"
    began = time.monotonic()
    with pytest.raises(NoState, match="it has no state of outer step 4"):
        client.fetch(served.address, 4, 60.0, lambda: False)
    assert time.monotonic() - began < 5.0, "the machine has moved on"
    threading.Timer(0.3, served.serve, (4, b"later", TENSORS, ["b:1"])).start()
    assert client.fetch(served.address, 4, 30.0)[0] == b"later"


def test_a_proxy_of_the_environment_is_not_used(server: Callable[..., StateServer]) -> None:
    served = server()
    served.serve(3, b"form", TENSORS, ["b:1"])
    with mock.patch.dict(
        os.environ, http_proxy="http://127.0.0.1:1", HTTP_PROXY="http://127.0.0.1:1", no_proxy=""
    ):
        # as in a process that starts with this environment
        loaded = runpy.run_path(client_module.__file__)["Client"]()
        assert loaded.fetch(served.address, 3, 30.0)[0] == b"form"
        assert loaded.ask(served.address) == {"id": "a:1"}


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
    assert client.ask(served.address) == {"id": "a:1"} and not waited
    assert client.ask(served.address, "waiting") == {"id": "a:1"} and waited


@pytest.mark.parametrize(
    "path",
    ["", "/", "state", "state/3", "state/3/-1", "state/3/3", "state/x/form", "../etc/passwd"],
)
def test_other_paths_are_not_found(server: Callable[..., StateServer], path: str) -> None:
    served = server()
    served.serve(3, b"", TENSORS, ["b:1"])
    with pytest.raises(NETWORK_ERRORS, match="404"):
        client.ask(served.address, path)


@pytest.mark.parametrize("content", [b"<html>", b"[1]"])
def test_a_server_of_something_else_is_no_machine(content: bytes) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request).start()
        with pytest.raises(OSError, match=r"127.0.0.1:\d+ is no machine of a training"):
            client.ask(f"127.0.0.1:{other.server_port}")
