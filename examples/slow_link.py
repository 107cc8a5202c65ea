"""Slows the connections between the ranks on one machine, without root: Linux paces each TCP socket
by itself.

    python examples/lightning_digits.py --hook int8_compress --mbit 20

`SlowLink` is a callback for Lightning; in a loop of your own call `limit(mbit)` before each step.
The limit holds for each connection and direction: with two ranks it is that of the link, with more
each pair of ranks has such a link. Where the system cannot do it, `limit` returns 0.
"""

import os
import socket
import stat
import struct
from typing import Any

from lightning.pytorch import Callback

SO_MAX_PACING_RATE = 47  # linux/socket.h: bytes per second


def limit(mbit: float) -> int:
    """Limit all TCP connections that this process has by now; returns their number."""
    limited = 0
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
        except OSError:  # the descriptor of the listing is closed by now
            continue
        with socket.socket(fileno=os.dup(int(descriptor))) as connection:
            if (
                connection.family not in (socket.AF_INET, socket.AF_INET6)
                or connection.type != socket.SOCK_STREAM
            ):
                continue
            try:
                connection.getpeername()
            except OSError:  # it listens
                continue
            connection.setsockopt(
                socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", int(mbit * 1e6 / 8))
            )
            limited += 1
    return limited


class SlowLink(Callback):
    """Limits the link before each step, so that connections made on the way are slow, too."""

    def __init__(self, mbit: float) -> None:
        self.mbit = mbit
        self.connections = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.connections = limit(self.mbit)
