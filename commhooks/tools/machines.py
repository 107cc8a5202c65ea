"""`commhooks machines`: the machines of a run with `members`, in a table."""

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from commhooks.errors import CommandError
from commhooks.members.client import NETWORK_ERRORS, Client
from commhooks.members.lighthouse import VARIABLE, address_of, id_of
from commhooks.members.secret import key_of
from commhooks.members.status_page import machines_at

_COLUMNS = ("machine", "round", "steps/s", "weight", "waited", "sent", "since")


@dataclass(frozen=True)
class Row:
    """A machine of the latest quorum. `numbers`: its answer; None: `failure` says why."""

    name: str
    numbers: dict[str, Any] | None = None
    failure: str = ""


def run(arguments: argparse.Namespace) -> None:
    if not (arguments.lighthouse or os.environ.get(VARIABLE)):
        raise CommandError(
            f"no lighthouse: give --lighthouse http://host:29510, or set {VARIABLE} as on the"
            " machines"
        )
    lighthouse = address_of(arguments.lighthouse)
    client = Client(key_of(None))
    console = Console()
    if arguments.once:
        console.print(table(ask_all(lighthouse, client), time.time()))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=False) as live:
        while True:
            live.update(table(ask_all(lighthouse, client), time.time()), refresh=True)
            time.sleep(arguments.every_s)


def ask_all(lighthouse: str, client: Client) -> list[Row]:
    """Ask all machines of the latest quorum. Raises CommandError without a lighthouse."""
    try:
        listed = [machine for machine in machines_at(lighthouse) if machine.server]
    except (*NETWORK_ERRORS, ValueError) as error:
        reason = getattr(error, "reason", error)  # urllib wraps it
        raise CommandError(f"the lighthouse at {lighthouse} does not answer: {reason}") from error
    if not listed:
        return []
    with ThreadPoolExecutor(min(16, len(listed)), "commhooks machines") as pool:
        return list(pool.map(lambda machine: _ask(client, machine.id, machine.server), listed))


def _ask(client: Client, id: str, server: str) -> Row:
    name = id_of(id).rpartition(":")[0]
    try:
        numbers = client.ask(server).get("numbers")
    except NETWORK_ERRORS as error:
        return Row(name, failure=str(error) or type(error).__name__)
    if not isinstance(numbers, dict):
        return Row(name, failure=f"{server} is another version of commhooks")
    return Row(name, numbers)


def table(rows: Sequence[Row], now: float) -> Table:
    failures = [f"{row.name}: {row.failure}" for row in rows if row.numbers is None]
    made = Table(caption="\n".join(failures) if rows else "no machine has taken part yet")
    for column in _COLUMNS:
        made.add_column(column, justify="left" if column == "machine" else "right")
    for row in sorted(rows, key=lambda row: row.name):
        made.add_row(row.name, *([] if row.numbers is None else _cells(row.numbers, now)))
    return made


def _cells(numbers: dict[str, Any], now: float) -> list[str]:
    steps_per_s, weight = numbers["steps_per_s"], numbers["weight"]
    return [
        str(numbers["round"]),
        "" if steps_per_s is None else f"{steps_per_s:.3g}",
        "" if weight is None else f"{100 * weight:.0f} %",
        f"{numbers['waited_s']:.1f} s",
        _bytes(numbers["bytes_sent"]),
        _duration(now - numbers["since"]),
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
