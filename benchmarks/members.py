"""Machines that die and come back: which share of their time is training, with live membership and
with restarts?

    python benchmarks/members.py [--seconds 120] [--kill-every 0 30] [--save-every 10 50 200]
    [--every 10] [--speeds 1 0.5 0.2] [--plot members.png]

Three machines of one process on this host train a small model with DiLoCo every --every steps. A
step takes --step-ms, most of which is sleep, so that the host can play three machines. Every
--kill-every seconds one of them is killed; 0: none. A machine of --speeds 0.5 takes two --step-ms
for a step.

  members   with `members="torchft"` and a lighthouse; a killed machine is started again at once
  torchrun  with DDP and `torchrun --max-restarts`, which restarts all processes if one dies. Rank 0
  saves every
            --save-every steps, and all begin from the newest checkpoint

--results writes what happened in the last run with members, a line of JSON for each outer step of
each machine, each death and each new start; --plot draws it, and with --from FILE what an earlier
run has written.

  trained   steps of all machines that are in the weights at the end, as a share of the steps of
            three machines that never die or wait: the sum over machines of seconds * speed / step
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, in_words, machine, number, parse, parser, report
from torch import nn

import commhooks

MACHINES = 3
COLORS = ("#1d4ed8", "#f59e0b", "#7c3aed")


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=120)
    made.add_argument("--kill-every", type=float, nargs="+", default=[0, 30])
    made.add_argument(
        "--save-every", type=int, nargs="*", default=[10, 50, 200], help="of torchrun"
    )
    made.add_argument("--step-ms", type=float, default=100)
    made.add_argument("--every", type=int, default=10, help="steps of a round")
    made.add_argument("--speeds", type=float, nargs=MACHINES, default=[1.0] * MACHINES)
    made.add_argument(
        "--results", type=Path, metavar="FILE", help="the last run with members, over time"
    )
    made.add_argument(
        "--from", dest="stored", type=Path, metavar="FILE", help="draw what --results has written"
    )
    made.add_argument("--plot", type=Path, metavar="PNG", help="draw it")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def main() -> None:
    args = parse(arguments(), seconds=12, kill_every=[6], save_every=[10])
    if args.worker is not None:
        work(**json.loads(args.worker))
        return
    if args.stored is not None:
        draw([json.loads(line) for line in args.stored.read_text().splitlines()], args.plot)
        return
    at = machine()
    rows: list[Row] = []
    happened: list[Row] = []
    for kill_every, save_every in itertools.product(args.kill_every, [None, *args.save_every]):
        if not kill_every and save_every is not None:
            continue  # what is saved does not matter
        with tempfile.TemporaryDirectory() as name:
            folder, step_s = Path(name), args.step_ms / 1e3
            job = (
                Members(folder, step_s, args.speeds, args.every)
                if save_every is None
                else Torchrun(folder, step_s, args.speeds, args.every, save_every)
            )
            try:
                kills, steps = job.measure(args.seconds, kill_every)
            finally:
                job.close()
            if save_every is None:
                happened = [
                    {"conditions": in_words(at), "seconds": args.seconds, "step_s": step_s},
                    *job.happened(),
                ]
        share = 100 * steps * step_s / (sum(args.speeds) * args.seconds)
        row = {"job": job.name, "save_every": save_every, "kill_every": kill_every, "kills": kills}
        rows.append(row | {"steps": steps, "share": share})
    columns = {
        "job": number("job"),
        "saves every": number("save_every", "{} steps"),
        "killed every": number("kill_every", "{:g} s"),
        "kills": number("kills"),
        "steps of all machines": number("steps"),
        "trained": number("share", "{:.0f} %"),
    }
    report("members", f"{MACHINES} machines, {args.seconds:g} s", args, at, rows, columns)
    if args.results is not None:
        args.results.write_text("".join(json.dumps(event) + "\n" for event in happened))
    if args.plot is not None:
        draw(happened, args.plot)


class Job:
    """Three machines that train. `name`: in the table."""

    name = ""

    def __init__(self, folder: Path, step_s: float, speeds: Sequence[float], every: int) -> None:
        self.folder = folder
        self.steps_s = [step_s / speed for speed in speeds]
        self.every = every
        self.chance = random.Random(0)
        self.began = 0.0
        self.events: list[Row] = []

    def trained(self) -> int:
        """Return the steps of all machines that are in the weights."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill a machine, and start it again if nobody else does."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def begun(self) -> bool:
        raise NotImplementedError

    def happened(self) -> list[Row]:
        """Return the outer steps of all machines and the events, in order; "time": seconds since
        the measurement began.
        """
        lines = [
            line
            for file in self.folder.glob("*.rounds")
            for line in file.read_text().split("\n")[:-1]
        ]
        found = sorted([*map(json.loads, lines), *self.events], key=lambda row: row["time"])
        return [row | {"time": round(row["time"] - self.began, 3)} for row in found]

    def measure(self, seconds: float, kill_every: float) -> tuple[int, int]:
        """Return how often a machine was killed, and the steps of all machines that have got into
        the weights.
        """
        deadline = time.time() + 120
        kills = 0
        while not self.begun():  # the start is not measured
            if time.time() > deadline:
                raise RuntimeError(
                    "".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
                )
            time.sleep(0.1)
        self.began = time.time()
        before = self.trained()
        deadline = self.began + seconds
        while kill_every and time.time() + kill_every < deadline:
            time.sleep(kill_every)
            self.kill()
            kills += 1
        time.sleep(max(0.0, deadline - time.time()))
        return kills, self.trained() - before

    def started(
        self, words: Sequence[str], log: str, given: Mapping[str, object], **environment: str
    ) -> Any:
        text = json.dumps(
            {"folder": str(self.folder), "steps_s": self.steps_s, "every": self.every} | given
        )
        command = [sys.executable, *words, __file__, "--worker", text]
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)


class Members(Job):
    name = "members"

    def __init__(self, folder: Path, step_s: float, speeds: Sequence[float], every: int) -> None:
        super().__init__(folder, step_s, speeds, every)
        os.environ["RUST_LOG"] = "error"  # read when it is imported
        from torchft.coordination import LighthouseServer

        self.lighthouse = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=60_000)
        self.lives = itertools.count()
        self.running = [self.start(place) for place in range(MACHINES)]

    def start(self, place: int) -> Any:
        address = f"http://127.0.0.1:{self.lighthouse.address().rpartition(':')[2]}"
        given = {
            "steps": f"{next(self.lives)}.steps",
            "lighthouse": address,
            "name": f"machine-{place}",
            "place": place,
        }
        self.events.append({"time": time.time(), "machine": given["name"], "event": "started"})
        return self.started([], f"{place}.log", given)

    def begun(self) -> bool:
        return sum(_last(file) > 0 for file in self.folder.glob("*.steps")) == MACHINES

    def trained(self) -> int:
        return sum(_last(file) for file in self.folder.glob("*.steps"))

    def kill(self) -> None:
        place = self.chance.randrange(MACHINES)
        self.running[place].kill()
        self.running[place].wait()
        self.events.append({"time": time.time(), "machine": f"machine-{place}", "event": "killed"})
        self.running[place] = self.start(place)

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        self.lighthouse.shutdown()


class Torchrun(Job):
    name = "torchrun"

    def __init__(
        self, folder: Path, step_s: float, speeds: Sequence[float], every: int, save_every: int
    ) -> None:
        super().__init__(folder, step_s, speeds, every)
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            "--max-restarts=1000",
        ]
        words += [f"--nproc-per-node={MACHINES}", "--monitor-interval=0.1"]
        # Torch 2.13: otherwise all attempts share one store, where gloo finds the addresses of dead
        # processes.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.process = self.started(
            words, "all.log", {"steps": "all.steps", "save_every": save_every}, **environment
        )

    def begun(self) -> bool:
        return _last(self.folder / "all.steps") > 0

    def trained(self) -> int:
        return MACHINES * _last(self.folder / "all.steps")

    def kill(self) -> None:
        rank = self.chance.randrange(MACHINES)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((self.folder / f"{rank}.pid").read_text()), signal.SIGKILL)

    def close(self) -> None:
        self.process.terminate()  # torchrun ends its processes
        self.process.wait()


def _last(file: Path) -> int:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return int(lines[-1]) if lines else 0


def work(
    folder: str,
    steps: str,
    steps_s: Sequence[float],
    every: int,
    lighthouse: str = "",
    name: str = "",
    place: int = 0,
    save_every: int | None = None,
) -> None:
    """Train until killed; a step takes `steps_s[place]` seconds. After each outer step, append to
    the file `steps` how many of this machine's steps are in the weights.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    trained = model
    config = commhooks.DiLoCo(sync_every=every)
    count = 0
    writes = True
    if save_every is None:
        members = commhooks.Torchft(lighthouse=lighthouse, name=name, timeout_s=20)
        hook = commhooks.attach(model, config, members=members)
    else:
        dist.init_process_group("gloo")
        place = dist.get_rank()
        writes = place == 0
        Path(folder, f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
        trained = nn.parallel.DistributedDataParallel(model)
        hook = commhooks.attach(trained, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = Path(folder, "checkpoint.pt")
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for part, content in (
            (model, saved["model"]),
            (optimizer, saved["optimizer"]),
            (hook, saved["hook"]),
        ):
            part.load_state_dict(content)
        count = saved["count"]
    generator = torch.Generator().manual_seed(os.getpid())
    first = save_every is None
    losses: list[float] = []
    with (
        open(Path(folder, steps), "a") as file,
        open(Path(folder, f"{steps}.rounds"), "a") as rounds,
    ):
        if count and writes:
            print(count, file=file, flush=True)
        while True:
            began = time.monotonic()
            inputs = torch.randn(32, 256, generator=generator)
            loss = nn.functional.cross_entropy(trained(inputs), inputs[:, :10].argmax(1))
            time.sleep(max(0.0, began + steps_s[place] - time.monotonic()))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            stats = hook.stats()
            if stats["step_in_round"] == 0:
                if first and stats["members"] > 1:
                    count, losses = 0, []  # this machine has just come: its first step is lost
                if writes:
                    print(count, file=file, flush=True)
                row = {
                    "time": time.time(),
                    "machine": name,
                    "members": stats["members"],
                    "step": stats["step"],
                }
                row["loss"] = sum(losses) / len(losses) if losses else None
                print(json.dumps(row), file=rounds, flush=True)
                losses = []
                first = False
            if save_every is not None and count % save_every == 0:
                content = {"hook": hook.state_dict(), "count": count}
                if writes:
                    replace(
                        checkpoint,
                        content
                        | {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                    )


def replace(checkpoint: Path, content: Row) -> None:
    """Save `content` so that a process that is killed meanwhile leaves the old file whole."""
    torch.save(content, checkpoint.with_suffix(".new"))
    checkpoint.with_suffix(".new").rename(checkpoint)


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
