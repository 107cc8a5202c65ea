"""The addresses of this machine at which others reach it."""

import contextlib
import fcntl
import os
import socket
import struct
from urllib.parse import urlsplit

from commhooks.errors import AttachError
from commhooks.members.report import is_loopback

_SIOCGIFADDR = 0x8915


def own_host(lighthouse: str) -> str:
    """Return the address of the interface through which this machine reaches the lighthouse. Raises
    AttachError.
    """
    parts = urlsplit(lighthouse if "//" in lighthouse else f"//{lighthouse}")
    try:
        return _host_towards(parts.hostname or "", parts.port or 80)
    except (OSError, ValueError) as error:
        raise AttachError(
            f"members: the lighthouse {lighthouse} cannot be found: {error}"
        ) from error


def host_for_others() -> str:
    """Return an address of this machine at which other machines may reach it, else its host
    name.
    """
    for outside in ("192.0.2.1", "2001:db8::1"):  # addresses of nobody, reserved for documentation
        with contextlib.suppress(OSError):
            return _host_towards(outside, 80)
    others = (host for host in interfaces().values() if not is_loopback(host))
    return next(others, socket.gethostname())


def _host_towards(host: str, port: int) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
    return f"[{own}]" if ":" in own else own


def interfaces() -> dict[str, str]:
    """Return the network interfaces of this machine that have an IPv4 address, by name. Linux
    only.
    """
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def check_interface(host: str) -> None:
    """Raise AttachError if gloo would listen where other machines cannot reach this one, whose
    address is `host`.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or is_loopback(host.strip("[]")):
        return
    if is_loopback(gloo := _address_of_gloo()):
        there = [name for name, address in interfaces().items() if address == host]
        interface = next(iter(there), f"the interface with the address {host}")
        raise AttachError(
            f"members: gloo would listen at {gloo}, to which the host name {socket.gethostname()}"
            f" leads, and other machines cannot connect there: set GLOO_SOCKET_IFNAME={interface}"
        )


def _address_of_gloo() -> str:
    """Return where gloo of torch 2.13 listens without GLOO_SOCKET_IFNAME: at the first address of
    the host name that this machine has.
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as listener:
                listener.bind(address)
                return str(address[0])
    return "127.0.0.1"
