"""Machines that come and go over a slow link: what does a machine that joins cost the others, and
what does `delay` save?

    sudo python benchmarks/members_link.py [--rate 10mbit] [--width 9500] [--every 50] [--delay 25]
                                          [--jobs joining delay] [--real-time]

Two machines of one process train over a switch (limited_link.py), each in a namespace whose link
has --rate, with rounds of --every steps of --step-ms, most of which is sleep. After --rounds rounds
a third machine comes, and takes the state of one of them: weights, momentum and the two moments of
AdamW. Then two machines train with `delay`.

  round     its length in seconds: median, least and most
  to first  difference of the median to that of the first row
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Row, machine, number, parse, parser, report, take_real_time
from limited_link import SUBNET, Switch

SCRIPT = Path(__file__).with_name("members_training.py")
LIMIT_S = 300.0
PORT = 29510
JOBS = ["joining", "delay"]
MACHINES = 2


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--rate", default="10mbit")
    made.add_argument("--width", type=int, default=9500, help="of the hidden layer")
    made.add_argument("--every", type=int, default=50, help="steps of a round")
    made.add_argument("--delay", type=int, default=25)
    made.add_argument("--step-ms", type=float, default=100)
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    made.add_argument("--real-time", action="store_true", help="go before other processes")
    return made


def main() -> None:
    quick = {"rate": "200mbit", "width": 64, "every": 10, "step_ms": 20, "rounds": 1}
    args = parse(arguments(), jobs=["joining"], **quick)
    if args.real_time:
        take_real_time()
    at = machine()
    rows = _of(args, comes="joining" in args.jobs)
    if "delay" in args.jobs:
        rows += _of(args, delay=args.delay)
    for row in rows:
        row["longer"] = 100 * (row["median_s"] / rows[0]["median_s"] - 1)
    columns = {
        "rounds": number("what"),
        "number": number("rounds"),
        "round": lambda row: "{median_s:.2f} s ({least_s:.2f} to {most_s:.2f})".format(**row),
        "to first": number("longer", "{:+.1f} %"),
    }
    state_mb = 4 * 267 * args.width / 1e6
    title = f"{args.rate}, weights of {state_mb:.1f} MB, rounds of {args.every} steps"
    report("members_link", title, args, at, rows, columns)


def _of(args: argparse.Namespace, *, delay: int = 0, comes: bool = False) -> list[Row]:
    """Let machines train, and return rows of the table."""
    given = {"job": "members", "every": args.every, "width": args.width, "delay": delay}
    given["step_s"] = [args.step_ms / 1e3] * (MACHINES + 1)
    with tempfile.TemporaryDirectory() as folder, Switch(MACHINES + comes) as link:
        link.limit(args.rate)
        with Training(link, Path(folder), given) as training:
            for place in range(MACHINES):
                training.start(place)
            together = training.wait_for(lambda: training.first_with(MACHINES))
            training.wait_for(lambda: len(training.lengths(together)) > args.rounds or None)
            label = f"delay={delay}" if delay else "two machines"
            rows = [_row(label, training.lengths(together)[: args.rounds])]
            if comes:
                began = time.time()
                training.start(MACHINES)
                ready = training.wait_for(lambda: training.ready(MACHINES))
                joined = training.wait_for(lambda: training.first_with(MACHINES + 1))
                label = f"a third one joins, in {joined - began:.0f} s"
                rows.append(_row(label, training.lengths(ready, joined)))
    return rows


def _row(what: str, lengths: list[float]) -> Row:
    return {
        "what": what,
        "rounds": len(lengths),
        "median_s": statistics.median(lengths),
        "least_s": min(lengths),
        "most_s": max(lengths),
    }


class Training:
    """Machines, each in its namespace, and the lighthouse in the first one."""

    def __init__(self, link: Switch, folder: Path, given: Row) -> None:
        self.link, self.folder, self.given = link, folder, given
        self.processes: list[subprocess.Popen[bytes]] = []
        self.lighthouse: Any = None

    def __enter__(self) -> "Training":
        os.environ["RUST_LOG"] = "error"  # read when it is imported
        from torchft.coordination import LighthouseServer

        def serve() -> None:
            self.lighthouse = LighthouseServer(f"0.0.0.0:{PORT}", 1, join_timeout_ms=60_000)

        self._inside(0, serve)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.lighthouse.shutdown()

    def _inside(self, place: int, do: Callable[[], None]) -> None:
        """Do it in a thread in the namespace of a machine; what it starts stays there."""

        def run() -> None:
            self.link.enter(place)
            do()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def start(self, place: int) -> None:
        given = self.given | {
            "folder": str(self.folder),
            "life": "",
            "place": place,
            "lighthouse": f"http://{SUBNET}.1:{PORT}",
        }
        more = {"GLOO_SOCKET_IFNAME": self.link.interfaces[place], "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{place}.log").open("ab") as file:
            output: Any = {"stdout": file, "stderr": file}
            command = [sys.executable, str(SCRIPT), json.dumps(given)]

            def run() -> None:
                self.processes.append(subprocess.Popen(command, env=os.environ | more, **output))

            self._inside(place, run)

    def rows(self, place: int) -> list[Row]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{place}.rows").read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    def ready(self, place: int) -> float | None:
        return next((row["time"] for row in self.rows(place)), None)

    def first_with(self, machines: int) -> float | None:
        """Return when the first machine has first ended a round with so many."""
        rows = self.rows(0)
        return next((row["time"] for row in rows if row.get("members") == machines), None)

    def lengths(self, since: float, until: float = float("inf")) -> list[float]:
        """Return the length of each round of the first machine that lies in this time."""
        times = [row["time"] for row in self.rows(0) if "step" in row]
        times = [when for when in times if since <= when <= until]
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

    def wait_for(self, get: Callable[[], Any]) -> Any:
        """Return the first result that is not None."""
        deadline = time.monotonic() + LIMIT_S
        while (result := get()) is None:
            ended = [process for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
                raise SystemExit(f"a machine has ended, or it took too long:\n{logs}")
            time.sleep(0.05)
        return result


if __name__ == "__main__":
    main()
