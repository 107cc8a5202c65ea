"""Machines that die and come back: which share of their time is training, with live membership,
with restarts, and with torchft's own algorithms?

    python benchmarks/members.py [--seconds 60] [--kill-every 0 30] [--save-every 50]
    [--every 10] [--speeds 1 0.5 0.2] [--jobs members torchrun] [--plot members.png]
    [--real-time]

Three machines of one process on this host train a small model, with an outer step every --every
steps. A step takes --step-ms, most of which is sleep, so that the host can play three machines.
Every --kill-every seconds one of them is killed, for the first time after half of it; 0: none. A
machine of --speeds 0.5 takes two --step-ms for a step. A process that ends by itself is started
again, too.

  members           with `members="torchft"` and a lighthouse; a killed machine is started again
  torchrun          with DDP and `torchrun --max-restarts`, which restarts all processes if one
                    dies. Rank 0 saves every --save-every steps, and all begin from the newest
                    checkpoint
  torchft-DiLoCo    with torchft's own DiLoCo and the options of its example `train_diloco.py`; its
  torchft-LocalSGD  lighthouse has the options of its README

Before, three machines train alone, with the same steps and without a hook: what is measured is what
the outer steps and the deaths cost, and not how long a sleep takes on this host. What is measured
begins and ends with an outer step.

--results writes what happened in the last run with members, a line of JSON for each outer step of
each machine, each death and each new start; --plot draws it, and with --from FILE what an earlier
run has written.

  trained   steps of all machines that are in the weights at the end, as a share of those that they
            make alone in the same time
  starts    what was lost because a killed process was not there: the start of Python, and imports
  pause     the longest time without an outer step of any machine
  ended     how many processes have ended by themselves

Of a job whose machines do not begin together within five minutes, 0 % are trained.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Row, in_words, machine, number, parse, parser, report, take_real_time

MACHINES = 3
COLORS = ("#1d4ed8", "#f59e0b", "#7c3aed")
SCRIPT = Path(__file__).with_name("members_training.py")
LIMIT_S = 300.0
JOIN_TIMEOUT_MS = {"torchft": 10_000, "members": 60_000}
"""Of a lighthouse: what the README of torchft has, and the default of `commhooks lighthouse`."""


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=60)
    made.add_argument("--alone-seconds", type=float, default=10)
    made.add_argument("--kill-every", type=float, nargs="+", default=[0, 30])
    made.add_argument("--save-every", type=int, default=50, help="of torchrun")
    made.add_argument("--step-ms", type=float, default=100)
    made.add_argument("--every", type=int, default=10, help="steps of a round")
    made.add_argument("--speeds", type=float, nargs=MACHINES, default=[1.0] * MACHINES)
    jobs = ["members", "torchrun", "torchft-DiLoCo", "torchft-LocalSGD"]
    made.add_argument("--jobs", nargs="+", choices=jobs, default=jobs)
    made.add_argument(
        "--results", type=Path, metavar="FILE", help="the last run with members, over time"
    )
    made.add_argument(
        "--from", dest="stored", type=Path, metavar="FILE", help="draw what --results has written"
    )
    made.add_argument("--plot", type=Path, metavar="PNG", help="draw it")
    made.add_argument("--real-time", action="store_true", help="go before other processes")
    return made


def main() -> None:
    args = parse(arguments(), seconds=12, alone_seconds=3, kill_every=[6], save_every=10)
    if args.stored is not None:
        draw([json.loads(line) for line in args.stored.read_text().splitlines()], args.plot)
        return
    if args.real_time:
        take_real_time()
    at = machine()
    rates = _run("alone", args).rates()
    if len(rates) < MACHINES:
        raise SystemExit("not even machines that train alone have begun")
    rows: list[Row] = []
    happened: list[Row] = []
    for kill_every, name in itertools.product(args.kill_every, args.jobs):
        if not kill_every and name == "torchrun":
            continue  # it restarts nothing
        job = _run(name, args, kill_every)
        rows.append({"job": name, "kill_every": kill_every} | job.measured(rates))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if name == "members":
            head = {"conditions": in_words(at), "seconds": args.seconds}
            happened = [head | {"step_s": args.step_ms / 1e3}, *job.happened()]
    columns = {
        "job": number("job"),
        "killed every": number("kill_every", "{:g} s"),
        "kills": number("kills"),
        "ended": number("ended"),
        "steps of all machines": number("steps"),
        "trained": number("share", "{:.1f} %"),
        "starts": number("starts", "{:.1f} %"),
        "pause": number("pause_s", "{:.1f} s"),
    }
    report("members", f"{MACHINES} machines, {args.seconds:g} s", args, at, rows, columns)
    if args.results is not None:
        args.results.write_text("".join(json.dumps(event) + "\n" for event in happened))
    if args.plot is not None:
        draw(happened, args.plot)


def _run(name: str, args: argparse.Namespace, kill_every: float = 0.0) -> "Job":
    """Run a job for --seconds."""
    seconds = args.alone_seconds if name == "alone" else args.seconds
    steps_s = [args.step_ms / 1e3 / speed for speed in args.speeds]
    # alone, only a line is written
    given = {"step_s": steps_s, "every": 5 if name == "alone" else args.every}
    with tempfile.TemporaryDirectory() as folder:
        if name == "torchrun":
            job: Job = Torchrun(name, Path(folder), given | {"save_every": args.save_every})
        else:
            job = Machines(name, Path(folder), given)
        try:
            job.run(seconds, kill_every)
        finally:
            job.close()
    return job


class Job:
    """Three machines that train.

    Attributes:
        rows: what they have written: see members_training.py.
        events: when a machine was started, was killed, or has ended by itself.
        first: the number of the outer step with which the measurement begins.
        began, ended: its times.
        restarts_all: whether all processes begin again when one has died.
    """

    restarts_all = False

    def __init__(self, name: str, folder: Path, given: Row) -> None:
        self.name = name
        self.folder = folder
        self.given = given
        self.chance = random.Random(0)
        self.rows: list[Row] = []
        self.events: list[Row] = []
        self.first = self.last = 0
        self.began = self.ended = 0.0

    def kill(self) -> None:
        """Kill a machine, and start it again if nobody else does."""
        raise NotImplementedError

    def start_again(self) -> None:
        """Start machines again that have ended by themselves."""

    def close(self) -> None:
        raise NotImplementedError

    def run(self, seconds: float, kill_every: float) -> None:
        """Measure for this time, and then until the next outer step."""
        if not self._wait_for(lambda: bool(self._common()), "to begin together"):
            return
        self.first = min(self._common())
        self.began = self._time_of(self.first)
        deadline = self.began + seconds
        next_kill = kill_every / 2
        while time.time() < deadline:
            time.sleep(0.05)
            self.start_again()
            if kill_every and time.time() > self.began + next_kill:
                next_kill += kill_every
                self.kill()
        self._wait_for(
            lambda: self._since(deadline) is not None and len(self.rates()) == MACHINES,
            "to take an outer step",
        )
        time.sleep(0.5)  # the others are about to write it
        last = self._since(deadline)
        self.last = sys.maxsize if last is None else last
        self.ended = time.time() if last is None else self._time_of(last)

    def _wait_for(self, met: Callable[[], bool], what: str) -> bool:
        deadline = time.time() + LIMIT_S
        while time.time() < deadline:
            if met():
                return True
            time.sleep(0.05)
            self.start_again()
        logs = "".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
        print(f"{self.name}: it took more than {LIMIT_S:g} s {what}\n{logs}", file=sys.stderr)
        return False

    def _read(self) -> list[Row]:
        """Return the outer steps so far."""
        texts = [file.read_text() for file in self.folder.glob("*.rows")]
        lines = itertools.chain.from_iterable(text.split("\n")[:-1] for text in texts)
        self.rows = sorted(map(json.loads, lines), key=lambda row: row["time"])
        return [row for row in self.rows if "step" in row]

    def _common(self) -> set[int]:
        """Return the outer steps that all machines have taken."""
        numbers: dict[str, set[int]] = defaultdict(set)
        for row in self._read():
            numbers[row["machine"]].add(row["step"])
        return set.intersection(*numbers.values()) if len(numbers) == MACHINES else set()

    def _since(self, deadline: float) -> int | None:
        """Return the first outer step after `deadline`."""
        rows = self._read()
        return next((row["step"] for row in rows if row["time"] > deadline and row["steps"]), None)

    def _time_of(self, step: int) -> float:
        return max(row["time"] for row in self._read() if row["step"] == step)

    def rates(self) -> dict[str, float]:
        """Return the steps per second of each machine, in whole rounds."""
        rates = {}
        for name in {row["machine"] for row in self.rows}:
            rounds = [row for row in self.rows if row["machine"] == name and "step" in row]
            if len(rounds) < 2:
                continue
            steps = sum(row["steps"] for row in rounds[1:])
            rates[name] = steps / (rounds[-1]["time"] - rounds[0]["time"])
        return rates

    def measured(self, rates: dict[str, float]) -> Row:
        """Return the columns of the table; `rates`: of machines that train alone."""
        counts = {
            "kills": sum(event["event"] == "killed" for event in self.events),
            "ended": sum(event["event"] == "ended" for event in self.events),
        }
        if not self.ended:  # they have not begun
            return counts | {"steps": 0, "share": 0.0, "starts": 0.0, "pause_s": LIMIT_S}
        steps: dict[tuple[str, int], int] = defaultdict(int)
        for row in self.rows:
            if "step" in row and self.first < row["step"] <= self.last:
                # once, if it was repeated after a restart
                key = row["machine"], row["step"]
                steps[key] = max(steps[key], row["steps"])
        alone = sum(rates.values()) * (self.ended - self.began)
        times = [row["time"] for row in self.rows if row.get("steps")]
        times = [when for when in times if self.began <= when <= self.ended] + [self.ended]
        return counts | {
            "steps": sum(steps.values()),
            "share": 100 * sum(steps.values()) / alone,
            "starts": 100 * self._starting(rates) / alone,
            "pause_s": max(later - earlier for earlier, later in itertools.pairwise(times)),
        }

    def _starting(self, rates: dict[str, float]) -> float:
        """Return how many steps were not made because processes were not there."""
        steps = 0.0
        for event in self.events:
            if event["event"] == "started" or not self.began < event["time"] < self.ended:
                continue
            for name in rates if self.restarts_all else [event["machine"]]:
                ready = [
                    row["time"]
                    for row in self.rows
                    if row.get("event") == "ready"
                    and row["machine"] == name
                    and row["time"] > event["time"]
                ]
                back = min([*ready, self.ended])
                steps += rates[name] * (back - event["time"])
        return steps

    def happened(self) -> list[Row]:
        """Return the outer steps of all machines and the events, in order; "time": seconds since
        the measurement began.
        """
        rows = [row for row in self.rows if row.get("event") != "ready"]
        rows = sorted([*rows, *self.events], key=lambda row: row["time"])
        return [row | {"time": round(row["time"] - self.began, 3)} for row in rows]

    def _note(self, event: str, place: int) -> None:
        self.events.append({"time": time.time(), "machine": f"machine-{place}", "event": event})

    def _start(self, words: Sequence[str], log: str, given: Row, **environment: str) -> Any:
        text = json.dumps({"folder": str(self.folder), "job": self.name} | self.given | given)
        command = [sys.executable, *words, str(SCRIPT), text]
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)


class Machines(Job):
    """Each machine is a process of its own; a lighthouse knows them."""

    def __init__(self, name: str, folder: Path, given: Row) -> None:
        super().__init__(name, folder, given)
        os.environ["RUST_LOG"] = "error"  # read when it is imported
        from torchft.coordination import LighthouseServer

        limit_ms = JOIN_TIMEOUT_MS["torchft" if name.startswith("torchft") else "members"]
        self.lighthouse = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=limit_ms)
        self.lives = itertools.count()
        self.running = [self.start(place) for place in range(MACHINES)]

    def start(self, place: int) -> Any:
        port = self.lighthouse.address().rpartition(":")[2]
        self._note("started", place)
        given = {"life": f"{next(self.lives)}-", "lighthouse": f"http://127.0.0.1:{port}"}
        return self._start([], f"{place}.log", given | {"place": place})

    def start_again(self) -> None:
        for place, process in enumerate(self.running):
            if process.poll() is not None:
                self._note("ended", place)
                self.running[place] = self.start(place)

    def kill(self) -> None:
        place = self.chance.randrange(MACHINES)
        self.running[place].kill()
        self.running[place].wait()
        self._note("killed", place)
        self.running[place] = self.start(place)

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        self.lighthouse.shutdown()


class Torchrun(Job):
    restarts_all = True

    def __init__(self, name: str, folder: Path, given: Row) -> None:
        super().__init__(name, folder, given)
        words = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        words += ["--max-restarts=1000", "--monitor-interval=0.1", f"--nproc-per-node={MACHINES}"]
        # Torch 2.13: otherwise all attempts share one store, where gloo finds the addresses of dead
        # processes.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.process = self._start(words, "all.log", {"life": ""}, **environment)

    def kill(self) -> None:
        rank = self.chance.randrange(MACHINES)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((self.folder / f"machine-{rank}.pid").read_text()), signal.SIGKILL)
        self._note("killed", rank)

    def close(self) -> None:
        self.process.terminate()  # torchrun ends its processes
        self.process.wait()


def draw(rows: Sequence[Row], path: Path) -> None:
    """Above, the number of machines that train together; below, the loss of each machine in each of
    its rounds.
    """
    from matplotlib.figure import Figure

    (head, *rows), end = rows, rows[0]["seconds"]
    rows = [row for row in rows if 0 <= row["time"] <= end]
    steps, names = (
        [row for row in rows if "members" in row],
        sorted({row["machine"] for row in rows}),
    )
    figure = Figure(figsize=(8.4, 4.2), facecolor="white")
    above, below = figure.subplots(2, sharex=True, height_ratios=(1, 2))
    times, counts = [row["time"] for row in steps], [row["members"] for row in steps]
    above.step([0.0, *times, end], [counts[0], *counts, counts[-1]], where="post", color=COLORS[0])
    above.set(ylabel="machines", ylim=(0, len(names) + 0.5), yticks=range(len(names) + 1))
    for name, color in zip(names, COLORS, strict=True):
        # a death has no loss, and interrupts the line
        own = [row for row in rows if row["machine"] == name]
        losses = [float("nan") if row.get("loss") is None else row["loss"] for row in own]
        style = {"markersize": 3, "linewidth": 0.8, "color": color, "label": name.replace("-", " ")}
        below.plot([row["time"] for row in own], losses, ".-", **style)
    for death in (row for row in rows if row.get("event") == "killed"):
        back = [
            row["time"]
            for row in steps
            if row["machine"] == death["machine"] and row["time"] > death["time"]
        ]
        marks = [(death["time"], "#b91c1c", "--", "is killed")]
        marks += [(when, "#15803d", ":", "is back") for when in back[:1]]
        for when, color, line, label in marks:
            above.axvline(when, color=color, linestyle=line, linewidth=1.2, label=label)
            below.axvline(when, color=color, linestyle=line, linewidth=1.2)
    legend = dict(zip(*reversed(above.get_legend_handles_labels()), strict=True))
    above.legend(legend.values(), legend.keys(), frameon=False, fontsize=8, loc="lower left")
    below.set(
        xlabel=f"seconds; a step takes {head['step_s'] * 1e3:.0f} ms",
        ylabel="loss, mean of the round",
        xlim=(0, end),
    )
    below.legend(frameon=False, fontsize=8)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=300)


if __name__ == "__main__":
    main()
