"""Ask the `StateServer` of another machine, and fetch its state."""

import contextlib
import ctypes
import hmac
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from commhooks.members.secret import HEADER, PROOF_BYTES, Key
from commhooks.members.watch import keep_alive, keep_from_children

PIECE_BYTES = 16 * 2**20
STATUS_LIMIT_S = 5.0
"""How long a machine may take to answer a question. A thread of its own answers."""

NETWORK_ERRORS = (OSError, http.client.HTTPException)
"""What a `Client` raises if the other machine is gone."""


class NoState(OSError):
    """Raised if the machine has no such state, and will not have it."""


class NotKept(OSError):
    """Raised if a machine does not keep an outer step."""


class _NotFound(OSError):
    pass


class Client:
    """Asks state servers. With a `key`, requests are signed, and answers without a proof raise
    OSError.

    Proxies of the environment are not used, because they do not reach machines of a private
    network.
    """

    def __init__(self, key: Key | None = None) -> None:
        self._key = key

    def ask(self, server: str, question: str = "status") -> dict[str, Any]:
        """Return the status of the machine with the `StateServer` at `server`. Raises one of
        `NETWORK_ERRORS` if it cannot be reached.
        """
        with self._get(server, f"/{question}", STATUS_LIMIT_S) as answer:
            text = answer.rest()
        try:
            status = json.loads(text)
        except ValueError as error:
            raise OSError(f"{server} is no machine of a training: {error}") from error
        if not isinstance(status, dict):
            raise OSError(f"{server} is no machine of a training")
        return status

    def fetch(
        self,
        server: str,
        step: int,
        limit_s: float,
        still_comes: Callable[[], bool] = lambda: True,
    ) -> tuple[bytes, Callable[[int, torch.Tensor], None]]:
        """Wait for the state of `step` at a `StateServer`. Returns its description, and a function
        that reads the tensor with a number into a contiguous tensor on the CPU. Raises one of
        `NETWORK_ERRORS` if the server is gone, or has no state of this step within `limit_s`;
        NoState as soon as `still_comes` returns False without it.
        """

        def read(number: int, into: torch.Tensor) -> None:
            with self._get(server, f"/state/{step}/{number}", limit_s) as answer:
                answer.read_into(bytes_of(into))

        deadline = time.monotonic() + limit_s
        while True:
            comes = still_comes()  # before the look, after which it may arrive
            with contextlib.suppress(_NotFound):
                with self._get(server, f"/state/{step}/form", limit_s) as answer:
                    return answer.rest(), read
            if not comes:
                raise NoState(f"it has no state of outer step {step}")
            if time.monotonic() > deadline:
                raise OSError(
                    f"it has not served the state of outer step {step} within {limit_s:g} s"
                )
            time.sleep(0.1)

    def running_round(self, server: str) -> int:
        """Return the number of the round that a machine trains. Raises one of `NETWORK_ERRORS`."""
        with self._get(server, "/history/running", STATUS_LIMIT_S) as answer:
            return int(answer.rest())

    def outer_step(self, server: str, round: int, limit_s: float) -> bytes:
        """Return the outer step of a round; b"" if the round is running there. Raises one of
        `NETWORK_ERRORS`, among them NotKept.
        """
        try:
            with self._get(server, f"/history/{round}", limit_s) as answer:
                return answer.rest()
        except _NotFound as error:
            raise NotKept(f"{server} does not keep the outer step of round {round}") from error

    def has_read(self, server: str, step: int, machine: str) -> None:
        """Tell a `StateServer` that `machine` has read the state of `step`."""
        path = f"/state/{step}/done/{urllib.parse.quote(machine, safe='')}"
        with contextlib.suppress(*NETWORK_ERRORS):  # it frees the copy after a while
            with self._get(server, path, STATUS_LIMIT_S) as answer:
                answer.rest()

    def watch(self, machine: str, server: str) -> socket.socket:
        """Return a connection to the `StateServer` of `machine` that stays open until one of both
        processes closes it. Raises OSError.
        """
        path = f"/watch/{urllib.parse.quote(machine, safe='')}"
        try:
            with self._get(server, path, STATUS_LIMIT_S) as answer:
                connection = answer.connection.dup()
                keep_from_children(connection)
                answer.rest()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        connection.settimeout(None)
        keep_alive(connection)
        return connection

    @contextlib.contextmanager
    def _get(self, server: str, path: str, limit_s: float) -> "Iterator[_Answer]":
        host, port = host_and_port(server)
        request = http.client.HTTPConnection(host, port, timeout=limit_s)
        nonce, header = "", {}
        if self._key is not None:
            nonce, header[HEADER] = self._key.sign_request(server, path)
        try:
            request.request("GET", path, headers=header)
            assert request.sock is not None
            connection = request.sock
            answer = request.getresponse()
            if answer.status == 404:
                raise _NotFound(f"{server}{path}: 404")
            if answer.status == 403:
                reason = answer.read(1000).decode(errors="replace")
                raise OSError(f"{server} refuses this machine: {reason}")
            if answer.status != 200:
                raise OSError(f"{server}{path}: {answer.status}")
            size = int(answer.headers.get("Content-Length", 0))
            code = None
            if self._key is not None:
                code = self._key.answer(path, nonce)
                size -= PROOF_BYTES
                if answer.headers.get(HEADER) is None:
                    raise OSError(f"{server} has no proof of the secret")
            yield _Answer(server, connection, answer, size, code)
        finally:
            request.close()


class _Answer:
    """The content of an answer, and the code of what has been read of it."""

    def __init__(
        self,
        server: str,
        connection: socket.socket,
        content: IO[bytes],
        size: int,
        code: "hmac.HMAC | None",
    ) -> None:
        self.connection = connection
        self._server = server
        self._content = content
        self._size = size
        self._code = code

    def rest(self) -> bytes:
        content = bytearray(self._size)
        self.read_into(memoryview(content))
        return bytes(content)

    def read_into(self, view: memoryview) -> None:
        """Read the content, which has the size of `view`. Raises OSError if it is another one, or
        without a proof of the secret.
        """
        if len(view) != self._size:
            raise OSError(f"{self._server} sends {self._size} bytes; expected {len(view)}")
        done = 0
        while done < len(view):
            count = self._content.readinto(view[done : done + PIECE_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise OSError(f"{self._server} has ended the transfer of its state")
            if self._code is not None:
                self._code.update(view[done : done + count])
            done += count
        if self._code is not None:
            proof = self._content.read(PROOF_BYTES)
            if not hmac.compare_digest(proof, self._code.digest()):
                raise OSError(f"{self._server} has no proof of the secret")


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


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor, for as long as the tensor is there. torch
    needs no numpy.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
