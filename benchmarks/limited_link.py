"""Nodes on one machine: network namespaces joined by a link that is slow or long, and the ranks in
them.

    with Link() as link, Ranks(link, Path(__file__), model_name="tiny") as ranks:
        link.limit("100mbit")
        answer = ranks.job(timeout_s=60, steps=5)

`tc tbf` limits the rate in both directions. `Switch` joins more nodes than two, and `LongLink` also
delays the packets. Needs Linux, root, `ip` and `tc` (LongLink: /dev/net/tun); if something is
missing, it exits with a message. The namespaces have names that no other run uses, and are removed
at the end, also after Ctrl-C and SIGTERM.
"""

import contextlib
import ctypes
import datetime
import fcntl
import json
import math
import multiprocessing
import os
import queue
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from common import Row, steady

SUBNET = "198.18.0"  # from the block for benchmarks (RFC 2544); used only inside the namespaces
PORT = 29500  # of the first node, in its namespace
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000  # linux/sched.h
MTU = 9000
QUEUE_S = 0.2
"""Seconds of data that wait at the end of a `LongLink`, at least; what comes on top is dropped."""

# ---- the link ------------------------------------------------------------------------------------


class Link:
    """Two namespaces, joined by a veth pair."""

    def __init__(self) -> None:
        self.namespaces = [f"commhooks-{os.getpid()}-{side}" for side in "ab"]
        self.interfaces = [f"ch{os.getpid()}{side}" for side in "ab"]

    def __enter__(self) -> "Link":
        if reason := _missing():
            raise SystemExit(reason)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            for namespace in self.namespaces:
                _run("ip", "netns", "add", namespace)
            self._join()
            for host, (namespace, interface) in enumerate(self.ends(), 1):
                _run("ip", "-n", namespace, "addr", "add", f"{SUBNET}.{host}/24", "dev", interface)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
                _run("ip", "-n", namespace, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # a second Ctrl-C must not interrupt the removal
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for namespace in self.namespaces:  # and with it its end of the link
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        signal.signal(signal.SIGINT, before)

    def _join(self) -> None:
        (namespace, peer_namespace), (interface, peer) = self.namespaces, self.interfaces
        ends = ("type", "veth", "peer", "name", peer, "netns", peer_namespace)
        _run("ip", "link", "add", interface, "netns", namespace, *ends)

    def ends(self) -> Iterator[tuple[str, str]]:
        return zip(self.namespaces, self.interfaces, strict=True)

    def limit(self, rate: str) -> None:
        """Limit what each node sends. The token bucket holds 1 ms of the rate, so that short
        messages are limited, too.
        """
        for namespace, interface in self.ends():
            _limit(namespace, interface, rate)


class Switch(Link):
    """A namespace for each node, or each rank, and one more with a bridge that joins them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        name = f"{os.getpid()}-{ranks}"
        self.namespaces = [f"commhooks-{name}-{rank}" for rank in range(ranks)]
        self.interfaces = [f"ch{os.getpid()}r{rank}" for rank in range(ranks)]
        self.hub = f"commhooks-{name}-hub"

    def _join(self) -> None:
        _run("ip", "netns", "add", self.hub)
        _run("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.hub, "link", "set", "bridge", "up")
        for namespace, interface in self.ends():
            peer = f"{interface}p"
            ends = ("type", "veth", "peer", "name", peer, "netns", self.hub)
            _run("ip", "link", "add", interface, "netns", namespace, *ends)
            _run("ip", "-n", self.hub, "link", "set", peer, "master", "bridge")
            _run("ip", "-n", self.hub, "link", "set", peer, "up")

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with contextlib.suppress(SystemExit):
            _run("ip", "netns", "del", self.hub)

    def enter(self, rank: int) -> None:
        """Move this thread, and what it starts, to the namespace of the rank."""
        with open(f"/var/run/netns/{self.namespaces[rank]}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self.namespaces[rank]}")


class LongLink(Link):
    """Two namespaces with a TUN device each, and a process that forwards their packets late. (`tc
    netem` would do the same, but not every kernel has it.) The process uses an eighth of a core at
    100 Mbit/s.
    """

    def __init__(self, rtt_ms: float) -> None:
        super().__init__()
        self._rtt_s = rtt_ms / 1000
        self._relay: Any = None

    def _join(self) -> None:
        devices = []
        for namespace, interface in self.ends():
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(
                device, TUNSETIFF, struct.pack("16sH", interface.encode(), IFF_TUN | IFF_NO_PI)
            )
            _run("ip", "link", "set", interface, "netns", namespace)
            _run(
                "ip",
                "-n",
                namespace,
                "link",
                "set",
                interface,
                "mtu",
                str(MTU),
                "txqueuelen",
                "5000",
            )
            devices.append(device)
        fork = multiprocessing.get_context("fork")
        self._rates, rates = fork.Pipe()
        self._relay = fork.Process(target=_relay, args=(devices, rates, self._rtt_s), daemon=True)
        self._relay.start()
        for device in devices:
            os.close(device)

    def limit(self, rate: str) -> None:
        self._rates.send(math.inf if rate == "unlimited" else bits_per_second(rate) / 8)

    def __exit__(self, *error: object) -> None:
        if self._relay is not None:
            self._relay.kill()
        super().__exit__(*error)


def _relay(devices: list[int], rates: Connection, rtt_s: float) -> NoReturn:
    """Forward the packets of each of two devices to the other, half a round trip late. `rates`
    sends new rates, in bytes per second.
    """
    bytes_per_s = math.inf
    # for each device: when they are due, and packets
    arriving: list[deque[tuple[float, bytes]]] = [
        deque(),
        deque(),
    ]
    sent_until = [0.0, 0.0]
    poll = select.poll()
    for file in (*devices, rates.fileno()):
        poll.register(file, select.POLLIN)
    while True:
        next_due = min(
            (packets[0][0] for packets in arriving if packets), default=time.monotonic() + 1
        )
        poll.poll(max(0.0, 1000 * (next_due - time.monotonic())))
        if rates.poll():
            bytes_per_s = rates.recv()
        for side, device in enumerate(devices):
            for packet in _waiting(device):
                now = time.monotonic()
                if sent_until[side] - now < max(QUEUE_S, 2 * rtt_s):
                    sent_until[side] = max(sent_until[side], now) + len(packet) / bytes_per_s
                    arriving[1 - side].append((sent_until[side] + rtt_s / 2, packet))
        for device, packets in zip(devices, arriving, strict=True):
            while packets and packets[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # that end is not up
                    os.write(device, packets.popleft()[1])


def _waiting(device: int) -> Iterator[bytes]:
    """Read the packets that wait, at most 64, so that the other side has its turn."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):
            yield os.read(device, MTU + 64)


def _limit(namespace: str, interface: str, rate: str) -> None:
    queue = ("-n", namespace, "qdisc")
    subprocess.run(["tc", *queue, "del", "dev", interface, "root"], capture_output=True)
    if rate != "unlimited":
        burst = max(10_000, int(bits_per_second(rate) / 8 / 1000))
        limits = ("burst", str(burst), "limit", str(max(10_000_000, 2 * burst)))
        _run("tc", *queue, "add", "dev", interface, "root", "tbf", "rate", rate, *limits)


def bits_per_second(rate: str) -> float:
    """Convert a rate in tc's notation (10mbit, 1gbit) to bit/s."""
    for unit, factor in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(
        f"--rates {rate}: expected a number of kbit, mbit or gbit, for example 100mbit, or"
        " unlimited"
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def _missing() -> str:
    """Return why this machine cannot limit a link, as a sentence; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "limiting a link needs Linux: network namespaces and tc"
    if os.geteuid() != 0:
        return "limiting a link needs root, to make network namespaces: run this with sudo"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"limiting a link needs {' and '.join(tools)} (package iproute2)"
    return ""


# ---- the ranks -----------------------------------------------------------------------------------


class Ranks:
    """Context manager: processes that run `script`, each in the namespace of its node.

    Args:
        script: calls `serve` if `is_rank()`.
        order: further arguments of the function that it serves with.
    """

    def __init__(self, link: Link, script: Path, ranks_per_node: int = 1, **order: Any) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        world_size = len(link.namespaces) * ranks_per_node
        self._folder = tempfile.TemporaryDirectory()
        self.errors = [Path(self._folder.name, f"rank_{rank}.txt") for rank in range(world_size)]
        for rank, (namespace, interface) in enumerate(
            end for end in link.ends() for _ in range(ranks_per_node)
        ):
            place = {
                "rank": rank,
                "world_size": world_size,
                "ranks_per_node": ranks_per_node,
                "interface": interface,
            }
            self.processes.append(
                subprocess.Popen(
                    [
                        "ip",
                        "netns",
                        "exec",
                        namespace,
                        sys.executable,
                        str(script),
                        json.dumps(place | order),
                    ],
                    env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=open(self.errors[rank], "w"),
                    text=True,
                )
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.processes[0].stdout is not None
        for line in self.processes[0].stdout:
            if not line.startswith("[Gloo]"):  # torch 2.8's says here who is connected
                self._answers.put(line)

    def job(self, timeout_s: float, **order: Any) -> Row:
        """Let all ranks do a job, and return the answer of rank 0."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(queue.Empty):
                return json.loads(self._answers.get(timeout=0.5))
            ended = [
                rank for rank, process in enumerate(self.processes) if process.poll() is not None
            ]
            if ended or time.monotonic() > deadline:
                what = f"rank {ended[0]} has ended" if ended else f"no answer in {timeout_s:.0f} s"
                tail = "\n".join(
                    self.errors[ended[0] if ended else 0].read_text().splitlines()[-15:]
                )
                raise RuntimeError(f"{what}; the last that it said:\n{tail}")

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def is_rank() -> bool:
    """Whether this process is one of `Ranks`."""
    return sys.argv[1:2] != [] and sys.argv[1].startswith("{")


def serve(worker: Callable[..., Callable[..., Row]]) -> NoReturn:
    """Connect to the other ranks over the link, and run the jobs of `Ranks.job`. `worker`: given
    this rank's place and the order of `Ranks`, makes the function that does a job.
    """
    place = json.loads(sys.argv[1])
    group = {
        "rank": place["rank"],
        "world_size": place["world_size"],
        "timeout": datetime.timedelta(minutes=30),
    }
    with steady(place["rank"]):
        dist.init_process_group("gloo", init_method=f"tcp://{SUBNET}.1:{PORT}", **group)
        job = worker(**place)
        for line in sys.stdin:
            answer = job(**json.loads(line))
            if place["rank"] == 0:
                print(json.dumps(answer), flush=True)
        os._exit(0)  # gloo sometimes aborts at interpreter shutdown, with or without a hook


def bytes_sent(interface: str) -> int:
    """Return the bytes that a network interface has sent so far, including headers."""
    return int(Path("/sys/class/net", interface, "statistics", "tx_bytes").read_text())


def bytes_sent_here(interface: str) -> int:
    """Return what an interface of this thread's namespace has sent, including headers."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise RuntimeError(f"no interface {interface}")
