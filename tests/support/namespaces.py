"""Hosts with addresses of their own, for tests: network namespaces around a router."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

_NET = "10.91"


class Hosts:
    """A namespace per name, each with a link to a router, the namespace `router`, which connects
    them.

    Host number i has the address 10.91.i.2, and the router 10.91.i.1 there.
    """

    def __init__(self, names: str) -> None:
        self.names = names
        self.router = self.namespace("router")

    def namespace(self, name: str) -> str:
        return f"commhooks-{os.getpid()}-{name}"

    def address(self, name: str) -> str:
        return f"{_NET}.{self.names.index(name) + 1}.2"

    def interface(self, name: str) -> str:
        return f"{name}0"

    def command(self, name: str) -> list[str]:
        """The beginning of a command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace(name)]

    def make(self) -> None:
        _run("netns", "add", self.router)
        _run("-n", self.router, "link", "set", "lo", "up")
        for number, name in enumerate(self.names, 1):
            namespace = self.namespace(name)
            interface = self.interface(name)
            _run("netns", "add", namespace)
            _run("-n", namespace, "link", "set", "lo", "up")
            there = ("peer", "name", f"to-{name}", "netns", self.router)
            _run("link", "add", interface, "netns", namespace, "type", "veth", *there)
            for where, link, address in ((namespace, interface, 2), (self.router, f"to-{name}", 1)):
                _run("-n", where, "addr", "add", f"{_NET}.{number}.{address}/24", "dev", link)
                _run("-n", where, "link", "set", link, "up")
            _run("-n", namespace, "route", "add", "default", "via", f"{_NET}.{number}.1")
        forward = [
            "ip",
            "netns",
            "exec",
            self.router,
            "sh",
            "-c",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
        ]
        subprocess.run(forward, check=True)

    def cut(self, name: str, *, off: bool) -> None:
        """Let the router refuse what other hosts send to this one, or no longer refuse it. The
        router itself is still reached.
        """
        number = self.names.index(name) + 1
        for other in self.names.replace(name, ""):
            how = (
                "iif",
                f"to-{other}",
                "to",
                f"{_NET}.{number}.0/24",
                "priority",
                "10",
                "prohibit",
            )
            _run("-n", self.router, "rule", "add" if off else "del", *how)

    def remove(self) -> None:
        for name in (*self.names, "router"):
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)


@contextlib.contextmanager
def hosts(names: str) -> Iterator[Hosts]:
    made = Hosts(names)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _run(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def missing() -> str:
    """Why this machine cannot make namespaces; "" if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root, and ip"
    name = f"commhooks-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return "this machine cannot make network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""
