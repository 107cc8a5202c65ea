"""Two nodes on one machine behind a wide-area link: with a delay, jitter and losses.

    with WideArea(Weather(rtt_ms=50)) as link:    # used as a `Link` of namespaces.py
        link.limit("100mbit")
        link.turn(Weather(rtt_ms=150, loss=0.001))
        link.break_off(10)                          # for ten seconds nothing arrives

Linux can delay packets itself (`tc netem`), but not every kernel supports it. Here each namespace has a TUN device, and
a separate process forwards the packets. It uses a part of a core while packets are sent: about an eighth at 100 Mbit/s
with packets of 9,000 bytes. Needs root, `ip` and /dev/net/tun.
"""

import contextlib
import dataclasses
import fcntl
import heapq
import math
import multiprocessing
import os
import random
import select
import struct
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from namespaces import Link, bits_per_second, run

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
MTU = 9000
QUEUE_S = 0.2
"""Seconds of data that the queue at the end of the link can hold, at least. Further packets are dropped."""


@dataclass(frozen=True)
class Weather:
    """Delay, jitter and loss of packets.

    Attributes:
        rtt_ms: delay of two packets, there and back.
        jitter_ms: maximum additional delay of a packet.
        loss: share of the packets that is lost.
    """

    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        """Describe it; "" for a link without any of them."""
        ms = [f"{value:g} ms{of}" for value, of in ((self.rtt_ms, ""), (self.jitter_ms, " jitter")) if value]
        return ", ".join([*ms, *([f"{100 * self.loss:g} % loss"] if self.loss else [])])


@dataclass(frozen=True)
class State:
    """The state of the link. `broken_until`: `time.monotonic()` at which packets pass again."""

    weather: Weather
    bytes_per_s: float = math.inf
    broken_until: float = 0.0


class WideArea(Link):
    """Two namespaces with a process that forwards their packets."""

    def __init__(self, weather: Weather) -> None:
        super().__init__(2)
        self._state = State(weather)
        self._relay: Any = None

    def join(self) -> None:
        devices = []
        for namespace, interface in self.ends():
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", interface.encode(), IFF_TUN | IFF_NO_PI))
            run("ip", "link", "set", interface, "netns", namespace)
            run("ip", "-n", namespace, "link", "set", interface, "mtu", str(MTU), "txqueuelen", "5000")
            devices.append(device)
        fork = multiprocessing.get_context("fork")
        self._orders, orders = fork.Pipe()
        self._relay = fork.Process(target=relay, args=(devices, orders, self._state), daemon=True)
        self._relay.start()
        for device in devices:
            os.close(device)

    def limit(self, rate: str) -> None:
        self._order(bytes_per_s=math.inf if rate == "unlimited" else bits_per_second(rate) / 8)

    def turn(self, weather: Weather) -> None:
        self._order(weather=weather)

    def break_off(self, seconds: float) -> None:
        """Lose all packets for that long, from now on."""
        self._order(broken_until=time.monotonic() + seconds)

    def _order(self, **changed: Any) -> None:
        self._state = dataclasses.replace(self._state, **changed)
        self._orders.send(self._state)

    def __exit__(self, *error: object) -> None:
        if self._relay is not None:
            self._relay.kill()
        super().__exit__(*error)


def relay(devices: list[int], orders: Connection, state: State) -> None:
    """Forward packets from each of two devices to the other, without end. `orders` sends new states."""
    waiting: list[tuple[float, int, int, bytes]] = []  # due, order, to, packet
    sent_until = [0.0, 0.0]
    count = 0
    poll = select.poll()
    for each in (*devices, orders.fileno()):
        poll.register(each, select.POLLIN)
    while True:
        idle_ms = 1000 * (waiting[0][0] - time.monotonic()) if waiting else 1000.0
        poll.poll(max(0.0, idle_ms))
        if orders.poll():
            state = orders.recv()
        weather, now = state.weather, time.monotonic()
        queue_s = max(QUEUE_S, 2 * weather.rtt_ms / 1000)
        for side, device in enumerate(devices):
            for _ in range(64):
                try:
                    packet = os.read(device, MTU + 64)
                except BlockingIOError:
                    break
                count += 1
                lost = now < state.broken_until or random.random() < weather.loss
                if lost or sent_until[side] - now > queue_s:
                    continue
                sent_until[side] = max(sent_until[side], now) + len(packet) / state.bytes_per_s
                late_ms = weather.rtt_ms / 2 + random.random() * weather.jitter_ms
                heapq.heappush(waiting, (sent_until[side] + late_ms / 1000, count, 1 - side, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # an end is not up
                os.write(devices[to], packet)
