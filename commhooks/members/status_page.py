"""The status page of torchft's lighthouse: which machines were in the latest quorum, and which send
heartbeats.
"""

import html
import re
import urllib.request
from dataclasses import dataclass

_LIMIT_S = 5.0
# torchft 0.2, templates/status.html: a participant of the latest quorum, and a heartbeat.
_PARTICIPANT = re.compile(r"<b>(.*?)</b>.*?Manager: (.*?) <br/>", re.DOTALL)
_HEARTBEAT = re.compile(r"^\s*(\S.*): seen (\S+)s ago\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Listed:
    """A machine of the latest quorum.

    Attributes:
        id: as the lighthouse knows it.
        server: the address of its state server; "" if it has left.
        heartbeat_s: seconds since its latest heartbeat.
    """

    id: str
    server: str
    heartbeat_s: float


def read_page(page: str) -> list[Listed]:
    """Return the machines of the latest quorum."""
    ages = {html.unescape(id): float(age) for id, age in _HEARTBEAT.findall(page)}
    return [
        Listed(html.unescape(id), html.unescape(server), ages.get(html.unescape(id), float("inf")))
        for id, server in _PARTICIPANT.findall(page)
    ]


def machines_at(lighthouse: str) -> list[Listed]:
    """Return the machines of the latest quorum of the lighthouse at this address. Raises OSError,
    or ValueError for something that is no lighthouse.
    """
    # A proxy of the environment does not reach machines of a private network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{lighthouse.rstrip('/')}/status", timeout=_LIMIT_S) as answer:
        return read_page(answer.read().decode())
