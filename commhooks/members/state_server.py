"""Serve this rank's state to machines that heal, answer other machines' questions, and fetch and
ask in turn.

Plain HTTP without proxies. Whoever reaches the port can read the weights.
"""

import ctypes
import functools
import http.server
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

import torch

from commhooks.members.history import History
from commhooks.members.watch import keep_from_children, wake

PIECE_BYTES = 16 * 2**20
_POLL_S = 0.1
STATUS_LIMIT_S = 5.0
"""How long a machine may take to answer a question. A thread of its own answers."""

NETWORK_ERRORS = (OSError, HTTPException)
"""What `fetch` and `ask` raise if the other machine is gone. URLError is an OSError."""

# A proxy of the environment does not reach machines of a private network.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class _Served:
    """A copy of the state after outer step `step`. `readers`: the ids of machines that have not
    read it yet.
    """

    step: int
    form: bytes
    tensors: list[torch.Tensor]
    readers: set[str]
    used_at: float = field(default_factory=time.monotonic)


class StateServer:
    """Serves this rank's state, and its status, from a thread.

    GET /state/STEP/form returns the description of the state, /state/STEP/NUMBER the bytes of a
    tensor, and /state/STEP/done/ID says that the machine ID has read it. 404 as long as there is no
    state of this step. GET /status returns what `status` returns, as JSON; /waiting calls
    `waited_for` before, and /ended/ROUND calls `ended` with the number of the round. GET
    /history/ROUND returns the outer step of a round, empty if the round is running, 404 if it is
    not kept; /history/running the number of the running round. The connection of GET /watch/ID
    stays open until this process or the other one closes it; 404 if ID is not this machine.

    Args:
        host: of this machine, at which it listens.
        limit_s: the copy is freed when no machine has read from it for this long, or when all have.
        status: returns what to tell about this machine.
        waited_for: is called when another machine has waited for this one for too long.
        ended: is called when another machine has done its part of a round.
        history: the outer steps since the state.
    """

    def __init__(
        self,
        host: str,
        limit_s: float,
        status: Callable[[], dict[str, Any]],
        waited_for: Callable[[], None] = lambda: None,
        ended: Callable[[int], None] = lambda round: None,
        history: History | None = None,
    ) -> None:
        self._limit_s, self._status, self._waited_for = limit_s, status, waited_for
        self._ended = ended
        self._history = history
        self._served: _Served | None = None
        self._lock = threading.Lock()
        self._watchers = set[socket.socket]()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 60

            def do_GET(self) -> None:
                server._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def get_request(self) -> tuple[Any, Any]:
                connection, address = super().get_request()
                keep_from_children(connection)
                return connection, address

            def handle_error(self, *_: Any) -> None:
                # a machine that gives up closes the connection
                if not isinstance(sys.exc_info()[1], OSError):
                    super().handle_error(*_)

            def service_actions(self) -> None:  # called at every poll
                server._free(only_unused=True)

        self._server = Server((host.strip("[]"), 0), Handler)
        keep_from_children(self._server.socket)
        self.address = f"{host}:{self._server.server_address[1]}"
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_POLL_S,), name="commhooks state", daemon=True).start()

    def serve(
        self, step: int, form: bytes, tensors: Sequence[torch.Tensor], readers: Collection[str]
    ) -> None:
        """Serve copies of `tensors`, described by `form`, from now on, in place of the state
        before, until all `readers` (ids of machines) have read it.
        """
        self._free()
        copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]
        with self._lock:
            self._served = _Served(step, form, copies, set(readers))

    @property
    def serving(self) -> bool:
        """Whether a copy of the state is in memory."""
        return self._served is not None

    def _free(self, *, only_unused: bool = False) -> None:
        with self._lock:
            served = self._served
            if (
                served is not None
                and only_unused
                and time.monotonic() < served.used_at + self._limit_s
            ):
                return
            self._served = None

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        kind, _, rest = request.path.strip("/").partition("/")
        if kind in ("status", "waiting") or kind == "ended" and rest.isdecimal():
            if kind == "waiting":
                self._waited_for()
            if kind == "ended":
                self._ended(int(rest))
            _send(request, memoryview(json.dumps(self._status()).encode()))
            return
        if kind == "history" and self._history is not None:
            running = str(self._history.round).encode()
            content = self._history.step(int(rest)) if rest.isdecimal() else running
            if content is None:
                request.send_error(404)
            else:
                _send(request, memoryview(content), self._history.use)
            return
        if kind == "watch" and urllib.parse.unquote(rest) == self._status().get("id"):
            _send(request, memoryview(b""))
            self._wait_for_end_of(request.connection)
            return
        served, (step, _, part) = self._served, rest.partition("/")
        if kind != "state" or served is None or step != str(served.step):
            request.send_error(404)
        elif part.startswith("done/"):
            served.readers.discard(urllib.parse.unquote(part.removeprefix("done/")))
            _send(request, memoryview(b""))
            if not served.readers:
                self._free()
        elif part == "form" or part.isdecimal() and int(part) < len(served.tensors):
            asked = (
                memoryview(served.form) if part == "form" else _bytes_of(served.tensors[int(part)])
            )
            _send(request, asked, functools.partial(self._read, served))
        else:
            request.send_error(404)

    def _read(self, served: _Served) -> None:
        served.used_at = time.monotonic()
        if self._history is not None:
            self._history.use()

    def _wait_for_end_of(self, connection: socket.socket) -> None:
        self._watchers.add(connection)
        try:
            connection.settimeout(None)
            connection.recv(1)
        finally:
            self._watchers.discard(connection)

    def close(self) -> None:
        """End, for ever. May be called again."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._watchers):
            wake(connection)
        self._free()


def _send(
    request: http.server.BaseHTTPRequestHandler,
    content: memoryview,
    after_piece: Callable[[], None] = lambda: None,
) -> None:
    request.send_response(200)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    for start in range(0, len(content), PIECE_BYTES):
        request.wfile.write(content[start : start + PIECE_BYTES])
        after_piece()


def ask(server: str, question: str = "status") -> dict[str, Any]:
    """Return the status of the machine with the `StateServer` at `server`. Raises one of
    `NETWORK_ERRORS` if it cannot be reached.
    """
    with _opener.open(f"http://{server}/{question}", timeout=STATUS_LIMIT_S) as answer:
        try:
            status = json.load(answer)
        except ValueError as error:
            raise OSError(f"{server} is no machine of a training: {error}") from error
    if not isinstance(status, dict):
        raise OSError(f"{server} is no machine of a training")
    return status


class NoState(OSError):
    """Raised if the machine has no such state, and will not have it."""


def fetch(
    server: str, step: int, limit_s: float, still_comes: Callable[[], bool] = lambda: True
) -> tuple[bytes, Callable[[int, torch.Tensor], None]]:
    """Wait for the state of `step` at a `StateServer`. Returns its description, and a function that
    reads the tensor with a number into a contiguous tensor on the CPU. Raises one of
    `NETWORK_ERRORS` if the server is gone, or has no state of this step within `limit_s`; NoState
    as soon as `still_comes` returns False without it.
    """

    def get(part: object) -> Any:
        return _opener.open(f"http://{server}/state/{step}/{part}", timeout=limit_s)

    def read(number: int, into: torch.Tensor) -> None:
        view, done = _bytes_of(into), 0
        with get(number) as answer:
            while done < len(view):
                count = answer.readinto(view[done : done + PIECE_BYTES])
                if not count:
                    raise OSError(f"{server} has ended the transfer of its state")
                done += count

    deadline = time.monotonic() + limit_s
    while True:
        comes = still_comes()  # before the look, after which it may arrive
        try:
            with get("form") as answer:
                return answer.read(), read
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
        if not comes:
            raise NoState(f"it has no state of outer step {step}")
        if time.monotonic() > deadline:
            raise OSError(f"it has not served the state of outer step {step} within {limit_s:g} s")
        time.sleep(0.1)


def open_watch(machine: str, server: str) -> socket.socket:
    """Return a connection to the `StateServer` of `machine` that stays open until one of both
    processes closes it. Raises OSError.
    """
    connection = socket.create_connection(host_and_port(server), STATUS_LIMIT_S)
    keep_from_children(connection)
    try:
        path = urllib.parse.quote(machine, safe="")
        connection.sendall(f"GET /watch/{path} HTTP/1.0\r\n\r\n".encode())
        with connection.makefile("rb", buffering=0) as answer:
            if b" 200 " not in (line := answer.readline()):
                raise OSError(f"{server} cannot be watched: {line.decode(errors='replace')}")
            while answer.readline() not in (b"\r\n", b""):
                pass
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def running_round(server: str) -> int:
    """Return the round that a machine trains. Raises one of `NETWORK_ERRORS`."""
    with _opener.open(f"http://{server}/history/running", timeout=STATUS_LIMIT_S) as answer:
        return int(answer.read())


class NotKept(OSError):
    """Raised if a machine does not keep an outer step."""


def fetch_step(server: str, round: int, limit_s: float) -> bytes:
    """Return the outer step of a round; b"" if the round is running there. Raises one of
    `NETWORK_ERRORS`, NotKept if the machine does not keep it.
    """
    try:
        with _opener.open(f"http://{server}/history/{round}", timeout=limit_s) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        raise NotKept(f"{server} does not keep the outer step of round {round}") from error


def has_read(server: str, step: int, machine: str) -> None:
    """Tell a `StateServer` that `machine` has read the state of `step`."""
    question = f"http://{server}/state/{step}/done/{urllib.parse.quote(machine, safe='')}"
    try:
        _opener.open(question, timeout=STATUS_LIMIT_S).close()
    except NETWORK_ERRORS:
        pass  # it frees the copy after a while


def listens(address: str) -> bool:
    """Return whether something listens at `address`."""
    try:
        socket.create_connection(host_and_port(address), STATUS_LIMIT_S).close()
    except (OSError, ValueError):
        return False
    return True


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor, for as long as the tensor is there. torch
    needs no numpy.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
