"""Which network interface of a machine carries what the ranks send: the one whose counter grows."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from commhooks.tools.network.link import bandwidth

SYSTEM = Path("/sys/class/net")  # Linux only
COUNTED_BYTES = 100_000
"""An interface that has sent less was not the one."""


@dataclass(frozen=True)
class Interface:
    """
    Attributes:
        name: as the system calls it; "" where it is not known, as with InfiniBand, which the system does not count.
        rated_mbit_per_s: what it is made for; None where it does not say.
    """

    name: str = ""
    rated_mbit_per_s: float | None = None

    @property
    def words(self) -> str:
        if not self.name:
            return "interface unknown"
        return self.name + (f", made for {bandwidth(self.rated_mbit_per_s)}" if self.rated_mbit_per_s else "")


def sent_bytes(system: Path = SYSTEM) -> dict[str, int]:
    """What each interface of this machine has sent."""
    found = {}
    for counter in system.glob("*/statistics/tx_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found[counter.parts[-3]] = int(counter.read_text())
    return found


def busiest(before: dict[str, int], others: bool, system: Path = SYSTEM) -> Interface:
    """The interface that has sent most since `before`.

    Args:
        before: an earlier `sent_bytes`.
        others: there are other machines, to which nothing goes over the loopback interface.
    """
    grown = {name: sent - before.get(name, sent) for name, sent in sent_bytes(system).items()}
    if others:
        grown.pop("lo", None)
    name = max(grown, key=lambda each: grown[each], default="")
    if not name or grown[name] < COUNTED_BYTES:
        return Interface()
    rated = None
    with contextlib.suppress(OSError, ValueError):  # virtual interfaces raise, or say -1
        rated = float((system / name / "speed").read_text())
    return Interface(name, rated if rated is not None and rated > 0 else None)
