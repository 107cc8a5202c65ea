"""Notice at once that the process of another machine has ended, because its sockets are closed."""

import contextlib
import functools
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping

_AGAIN_S = 0.5


class Watch:
    """Keeps a connection open to the state server of each other machine.

    The kernel closes the sockets of a process that ends, also if it was killed, and refuses further
    connections. The sockets of a process that is slow, or stopped, or holds its GIL, stay open. So
    a machine is dead if its connection is closed and another one is refused. If its host does not
    answer at all, nothing follows from that here: the lighthouse misses its heartbeats.

    Args:
        died: is called from a thread, with the id of the machine.
        connect: opens a connection to the state server of a machine, from its id and the address.
            Raises OSError.
    """

    def __init__(
        self, died: Callable[[str], None], connect: Callable[[str, str], socket.socket]
    ) -> None:
        self._died = died
        self._connect = connect
        self._servers: dict[str, str] = {}
        self._connections: dict[str, socket.socket] = {}
        self._closed = threading.Event()

    def follow(self, servers: Mapping[str, str]) -> None:
        """Watch these machines, by id, and no others."""
        new = servers.keys() - self._servers.keys()
        self._servers = dict(servers)
        for id, connection in list(self._connections.items()):
            if id not in servers:
                wake(connection)
        for id in new:
            threading.Thread(
                target=self._watch, args=(id,), name="commhooks watch", daemon=True
            ).start()

    def _watch(self, id: str) -> None:
        while not self._closed.is_set() and (server := self._servers.get(id)) is not None:
            try:
                connection = self._connect(id, server)
            except ConnectionRefusedError:
                self._servers.pop(id, None)
                self._died(id)
                return
            except OSError:
                self._closed.wait(_AGAIN_S)
                continue
            with connection, contextlib.suppress(OSError):
                self._connections[id] = connection
                if id in self._servers and not self._closed.is_set():
                    connection.recv(1)  # returns when the connection is closed
            self._connections.pop(id, None)

    def close(self) -> None:
        self._closed.set()
        self.follow({})


def wake(connection: socket.socket) -> None:
    """End both directions of `connection`, so that a thread that waits for it goes on."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: socket.socket) -> None:
    """Notice after some time (Linux: two hours) that the other host is gone without a word, so that
    a thread does not wait for `connection` for ever.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


# ---- sockets and fork
# --------------------------------------------------------------------------------------------------


def keep_from_children(connection: socket.socket) -> None:
    """Close `connection` in processes that are forked from this one, such as workers of a
    DataLoader. They may outlive it, and the connection would stay open.
    """
    _kept().add(connection)


@functools.cache
def _kept() -> "weakref.WeakSet[socket.socket]":
    kept: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def close_all() -> None:
        for connection in list(kept):
            descriptor = connection.detach()
            if descriptor >= 0:
                os.close(descriptor)

    os.register_at_fork(after_in_child=close_all)
    return kept
