"""`examples/slow_link.py` slows connections, leaves the rest alone, and keeps no descriptor."""

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import slow_link

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux paces sockets")
BYTES = 2_000_000


def _seconds(sender: socket.socket, receiver: socket.socket) -> float:
    thread = threading.Thread(target=sender.sendall, args=(bytes(BYTES),))
    began = time.monotonic()
    left = BYTES
    thread.start()
    while left:
        left -= len(receiver.recv(65536))
    thread.join()
    return time.monotonic() - began


def test_a_connection_is_slow_in_both_directions(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, (tmp_path / "a file").open("w"):
        with (
            socket.create_connection(listening.getsockname()) as one,
            listening.accept()[0] as other,
        ):
            before = len(os.listdir("/proc/self/fd"))
            assert [slow_link.limit(8) for _ in range(100)][-1] >= 2
            assert len(os.listdir("/proc/self/fd")) == before
            # the first packets are not held back
            assert _seconds(one, other) > 0.7 * BYTES * 8 / 8e6
            assert _seconds(other, one) > 0.7 * BYTES * 8 / 8e6
            slow_link.limit(1e6)
            # other processes may take the processor meanwhile
            assert _seconds(one, other) < 0.5 * BYTES * 8 / 8e6
