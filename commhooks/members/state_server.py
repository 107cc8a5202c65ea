"""Serve this rank's state to machines that heal, and answer questions of other machines; they ask
by `client.py`.

Plain HTTP. Without a secret, whoever reaches the port can read the weights.
"""

import contextlib
import functools
import hmac
import http.server
import json
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from commhooks.members.client import bytes_of
from commhooks.members.history import History
from commhooks.members.lines import Lines
from commhooks.members.secret import HEADER, PROOF_BYTES, Key, Refused
from commhooks.members.watch import keep_alive, keep_from_children, wake

_POLL_S = 0.1
_PIECE_BYTES = 2**18
"""Of a state, after which a transfer looks whether to pause; and how much of it may wait in the
kernel to be sent.
"""
_LONGEST_PAUSE_S = 10.0
_MOST_LINES = 100
"""About refused requests: whoever reaches the port can send them, from many addresses."""


@dataclass
class _Served:
    """A copy of the state after an outer step. `steps`: for which it is served: this one, and later
    ones whose readers take the outer steps in between. `readers`: the ids of machines that have not
    read it yet.
    """

    steps: set[str]
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
    stays open until this process or the other one closes it; 404 if ID is not this
    machine. With a `key`, 403 without a proof of the secret.

    Args:
        host: of this machine, at which it listens.
        limit_s: returns after how many seconds the copy is freed that no machine has read from. It
            is freed, too, when all have.
        status: returns what to tell about this machine.
        waited_for: is called when another machine has waited for this one for too long.
        ended: is called when another machine has done its part of a round.
        key: of the secret that all machines share.
        history: the outer steps since the state.
        lines: logs the first refused request of each address and reason.
    """

    def __init__(
        self,
        host: str,
        limit_s: Callable[[], float],
        status: Callable[[], dict[str, Any]],
        waited_for: Callable[[], None] = lambda: None,
        ended: Callable[[int], None] = lambda round: None,
        key: Key | None = None,
        history: History | None = None,
        lines: Lines | None = None,
    ) -> None:
        self._lines = lines
        self._refused = set[tuple[str, str]]()
        self._limit_s = limit_s
        self._status = status
        self._waited_for = waited_for
        self._ended = ended
        self._key = key
        self._history = history
        self._goes_on = threading.Event()  # not set while transfers pause
        self._goes_on.set()
        self._served: _Served | None = None
        self._lock = threading.Lock()
        self._watchers = set[socket.socket]()
        self._server = _http_server(host, self)
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
            self._served = _Served({str(step)}, form, copies, set(readers))

    def serve_also(self, step: int, readers: Collection[str]) -> bool:
        """Serve the present copy, of an earlier step, for the state of `step`, too. Return whether
        there is one.
        """
        with self._lock:
            if self._served is None:
                return False
            self._served.steps.add(str(step))
            self._served.readers |= set(readers)
            self._served.used_at = time.monotonic()
            return True

    @property
    def serving(self) -> bool:
        """Whether a copy of the state is in memory."""
        return self._served is not None

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Send little of the state during the body, in which the machines exchange, so that a
        machine that comes does not hold them up. If it takes long, a piece is sent from time to
        time, so that the reader does not give up.
        """
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()

    def _free(self, *, only_unused: bool = False) -> None:
        with self._lock:
            served = self._served
            if (
                served is not None
                and only_unused
                and time.monotonic() < served.used_at + self._limit_s()
            ):
                return
            self._served = None

    def _check_and_answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        if self._key is None:
            self._answer(_Reply(request, None))
            return
        try:
            nonce = self._key.check_request(self.address, request.path, request.headers.get(HEADER))
        except Refused as refused:
            self._log(request.client_address[0], refused)
            content = str(refused).encode()
            request.send_response(403)
            request.send_header("Content-Length", str(len(content)))
            request.end_headers()
            request.wfile.write(content)
            return
        self._answer(_Reply(request, self._key.answer(request.path, nonce)))

    def _log(self, address: str, refused: Refused) -> None:
        seen = address, refused.reason
        if self._lines is None or seen in self._refused or len(self._refused) >= _MOST_LINES:
            return
        self._refused.add(seen)
        self._lines.say("a request from %s is refused: %s", *seen, about=f"{seen}", once=True)

    def _answer(self, reply: "_Reply") -> None:
        kind, _, rest = reply.request.path.strip("/").partition("/")
        if kind in ("status", "waiting") or kind == "ended" and rest.isdecimal():
            if kind == "waiting":
                self._waited_for()
            if kind == "ended":
                self._ended(int(rest))
            reply.send(memoryview(json.dumps(self._status()).encode()))
        elif kind == "watch" and urllib.parse.unquote(rest) == self._status().get("id"):
            reply.send(memoryview(b""))
            self._wait_for_end_of(reply.request.connection)
        elif kind == "history" and self._history is not None:
            self._answer_history(reply, self._history, rest)
        elif kind == "state":
            self._answer_state(reply, *rest.partition("/")[::2])
        else:
            reply.request.send_error(404)

    def _answer_history(self, reply: "_Reply", history: History, asked: str) -> None:
        content = history.step(int(asked)) if asked.isdecimal() else str(history.round).encode()
        if content is None:
            reply.request.send_error(404)
        else:
            reply.send(memoryview(content), self._next_piece)

    def _answer_state(self, reply: "_Reply", step: str, part: str) -> None:
        served = self._served
        if served is None or step not in served.steps:
            reply.request.send_error(404)
        elif part.startswith("done/"):
            served.readers.discard(urllib.parse.unquote(part.removeprefix("done/")))
            reply.send(memoryview(b""))
            if not served.readers:
                self._free()
        elif part == "form" or part.isdecimal() and int(part) < len(served.tensors):
            content = (
                memoryview(served.form) if part == "form" else bytes_of(served.tensors[int(part)])
            )
            reply.send(content, functools.partial(self._next_piece, served))
        else:
            reply.request.send_error(404)

    def _next_piece(self, served: _Served | None = None) -> None:
        """Note that a machine reads, and wait until the next piece may be sent."""
        if served is not None:
            served.used_at = time.monotonic()
        if self._history is not None:
            self._history.use()
        self._goes_on.wait(min(_LONGEST_PAUSE_S, self._limit_s() / 4))

    def _wait_for_end_of(self, connection: socket.socket) -> None:
        self._watchers.add(connection)
        try:
            connection.settimeout(None)
            keep_alive(connection)
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


@dataclass
class _Reply:
    """Answers a request. `code`: to which the content is added, and which is sent after it."""

    request: http.server.BaseHTTPRequestHandler
    code: "hmac.HMAC | None"

    def send(self, content: memoryview, after_piece: Callable[[], None] = lambda: None) -> None:
        request, code = self.request, self.code
        request.send_response(200)
        size = len(content)
        if code is not None:
            request.send_header(HEADER, "follows")
            size += PROOF_BYTES
        request.send_header("Content-Length", str(size))
        request.end_headers()
        for start in range(0, len(content), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            request.wfile.write(piece)
            if code is not None:
                code.update(piece)
            after_piece()
        if code is not None:
            request.wfile.write(code.digest())


def _http_server(host: str, owner: StateServer) -> http.server.ThreadingHTTPServer:
    """Listen at a free port of `host`, and let `owner` answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 60

        def do_GET(self) -> None:
            owner._check_and_answer(self)

        def log_message(self, *_: Any) -> None: ...

    class Server(http.server.ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def get_request(self) -> tuple[Any, Any]:
            connection, address = super().get_request()
            keep_from_children(connection)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux and macOS
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _PIECE_BYTES)
            return connection, address

        def handle_error(self, *_: Any) -> None:
            if not isinstance(sys.exc_info()[1], OSError):  # a machine has given up
                super().handle_error(*_)

        def service_actions(self) -> None:  # called at every poll
            owner._free(only_unused=True)

    server = Server((host.strip("[]"), 0), Handler)
    keep_from_children(server.socket)
    return server
