"""Machines that die and come back: which share of their time is training, with live membership?

    python benchmarks/members.py [--seconds 120] [--kill-every 0 30]

Three machines of one process on this host train a small model with DiLoCo every 10 steps, `members="torchft"` and a
lighthouse. A step takes --step-ms, most of which is sleep, so that the host can play three machines. Every --kill-every
seconds one of them is killed, and started again at once; 0: none.

  trained   steps of all machines that are in the weights at the end, as a share of the steps of three machines that
            never die or wait: seconds / step
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import Row, number, parse, parser, report
from machine import machine
from torch import nn

import commhooks

MACHINES = 3
EVERY = 10


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=120)
    made.add_argument("--kill-every", type=float, nargs="+", default=[0, 30])
    made.add_argument("--step-ms", type=float, default=100)
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def main() -> None:
    args = parse(arguments(), seconds=12, kill_every=[6])
    if args.worker is not None:
        work(**json.loads(args.worker))
        return
    at, rows = machine(), list[Row]()
    for kill_every in args.kill_every:
        with tempfile.TemporaryDirectory() as folder:
            kills, steps = train(Path(folder), args.seconds, kill_every, args.step_ms / 1e3)
        share = 100 * steps * args.step_ms / 1e3 / (MACHINES * args.seconds)
        rows.append({"kill_every": kill_every, "kills": kills, "steps": steps, "share": share})
    columns = {
        "killed every": number("kill_every", "{:g} s"),
        "kills": number("kills"),
        "steps of all machines": number("steps"),
        "trained": number("share", "{:.0f} %"),
    }
    report("members", f"{MACHINES} machines, {args.seconds:g} s", args, at, rows, columns)


def train(folder: Path, seconds: float, kill_every: float, step_s: float) -> tuple[int, int]:
    """Return how often a machine was killed, and the steps of all machines that are in the weights."""
    os.environ["RUST_LOG"] = "error"  # read when it is imported
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=60_000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    lives = itertools.count()

    def start(place: int) -> "subprocess.Popen[bytes]":
        steps = folder / f"{next(lives)}.steps"
        given = {"steps": str(steps), "step_s": step_s, "lighthouse": address, "name": f"machine-{place}"}
        with steps.with_suffix(".log").open("wb") as log:
            return subprocess.Popen([sys.executable, __file__, "--worker", json.dumps(given)], stdout=log, stderr=log)

    running = [start(place) for place in range(MACHINES)]
    chance, kills = random.Random(0), 0
    deadline = time.time() + 120
    while sum(_last(file) > 0 for file in folder.glob("*.steps")) < MACHINES:  # the start is not measured
        if time.time() > deadline:
            raise RuntimeError("".join(each.read_text()[-2000:] for each in folder.glob("*.log")))
        time.sleep(0.1)
    before, deadline = sum(_last(file) for file in folder.glob("*.steps")), time.time() + seconds
    while kill_every and time.time() + kill_every < deadline:
        time.sleep(kill_every)
        place = chance.randrange(MACHINES)
        running[place].kill()
        running[place].wait()
        running[place] = start(place)
        kills += 1
    time.sleep(max(0.0, deadline - time.time()))
    steps = sum(_last(file) for file in folder.glob("*.steps")) - before
    for each in running:
        each.kill()
        each.wait()
    lighthouse.shutdown()
    return kills, steps


def _last(file: Path) -> int:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return int(lines[-1]) if lines else 0


def work(steps: str, step_s: float, lighthouse: str, name: str) -> None:
    """Train until killed. After each outer step, append to the file `steps` how many of this machine's steps are in the
    weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    members = commhooks.Torchft(lighthouse=lighthouse, name=name, timeout_s=20)
    hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=EVERY), members=members)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(os.getpid())
    count, first = 0, True
    with open(steps, "a") as file:
        while True:
            began = time.monotonic()
            inputs, targets = torch.randn(32, 256, generator=generator), torch.randint(10, (32,), generator=generator)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            time.sleep(max(0.0, began + step_s - time.monotonic()))
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if hook.stats()["step_in_round"] == 0:
                if first and hook.stats()["members"] > 1:
                    count = 0  # this machine has just come: its first step is lost
                print(count, file=file, flush=True)
                first = False


if __name__ == "__main__":
    main()
