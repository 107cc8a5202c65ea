"""Nodes on one machine: network namespaces, joined by a link that `tc tbf` limits.

    with Link(nodes=2) as link:
        link.limit("100mbit")
        for namespace, interface in link.ends(): ...    # start a process there with `ip netns exec`

Needs Linux, root, `ip` and `tc`; if one is missing, it exits with a message.
"""

import os
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Iterator

SUBNET = "198.18.0"  # from the block for benchmarks (RFC 2544); used only inside the namespaces


class Link:
    """A namespace per node: two joined by a veth pair, more by a bridge in a further namespace. They are removed at the
    end, and after SIGTERM, which raises SystemExit from here on."""

    def __init__(self, nodes: int) -> None:
        sides = string.ascii_lowercase[:nodes]
        self.namespaces = [f"commhooks-{os.getpid()}-{side}" for side in sides]
        self.interfaces = [f"ch{os.getpid()}{side}" for side in sides]
        self._bridge = f"commhooks-{os.getpid()}-bridge" if nodes > 2 else None

    def __enter__(self) -> "Link":
        if reason := _missing():
            raise SystemExit(reason)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            for namespace in self.namespaces:
                run("ip", "netns", "add", namespace)
            self.join()
            for host, (namespace, interface) in enumerate(self.ends(), 1):
                run("ip", "-n", namespace, "addr", "add", f"{SUBNET}.{host}/24", "dev", interface)
                run("ip", "-n", namespace, "link", "set", "lo", "up")
                run("ip", "-n", namespace, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the removal
        for namespace in [*self.namespaces, *([] if self._bridge is None else [self._bridge])]:  # and with it its links
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        signal.signal(signal.SIGINT, before)

    def join(self) -> None:
        """Make the interfaces."""
        bridge = self._bridge
        if bridge is None:
            (a, b), (one, two) = self.namespaces, self.interfaces
            run("ip", "link", "add", one, "netns", a, "type", "veth", "peer", "name", two, "netns", b)
            return
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for namespace, interface in self.ends():
            port = f"{interface}p"
            ends = ("type", "veth", "peer", "name", port, "netns", bridge)
            run("ip", "link", "add", interface, "netns", namespace, *ends)
            run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")

    def ends(self) -> Iterator[tuple[str, str]]:
        return zip(self.namespaces, self.interfaces, strict=True)

    def limit(self, rate: str) -> None:
        """Limit the rate at which each node sends; for two nodes that is both directions. The token bucket holds 1 ms
        of the rate, so that short messages are limited, too."""
        for namespace, interface in self.ends():
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"], capture_output=True)
            if rate != "unlimited":
                burst = max(10_000, int(bits_per_second(rate) / 8 / 1000))
                shape = ("tbf", "rate", rate, "burst", str(burst), "limit", str(max(10_000_000, 2 * burst)))
                run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shape)


def bits_per_second(rate: str) -> float:
    """Convert a rate in tc's notation (10mbit, 1gbit) to bit/s."""
    for unit, factor in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(f"--rates {rate}: expected a number of kbit, mbit or gbit, for example 100mbit, or unlimited")


def run(*command: str) -> None:
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
