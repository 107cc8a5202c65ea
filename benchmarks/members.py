"""Machines that die: which share of their time is training, with live membership and with torchrun's restarts?

    python benchmarks/members.py [--seconds 180] [--kill-every 30] [--save-every 20 100 500]

Three machines of one process on this host train a small model with DiLoCo every 10 steps. A step takes --step-ms,
most of which is sleep, so that the host can play three machines. Every --kill-every seconds one of them is killed, and
started again at once.

  members        `members="torchft"`, with a lighthouse: the others go on
  torchrun       `torchrun --max-restarts`: all processes restart from the last checkpoint, which rank 0 has saved after
                 every N steps

  trained   steps that are in the weights at the end, of all machines together, as a share of what three machines would
            have trained that never die nor wait: seconds / step
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, number, parse, parser, report
from machine import machine
from torch import nn

import commhooks

MACHINES = 3
EVERY = 10


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=180)
    made.add_argument("--kill-every", type=float, default=30)
    made.add_argument("--step-ms", type=float, default=100)
    made.add_argument("--save-every", type=int, nargs="+", default=[20, 100, 500], metavar="N")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    args = parse(made, seconds=12, kill_every=6, save_every=[20])
    if args.worker is not None:
        work(**json.loads(args.worker))
        return
    at, rows = machine(), list[Row]()
    for save_every in [0, *args.save_every]:
        with tempfile.TemporaryDirectory() as folder:
            run = _members if save_every == 0 else _torchrun
            kills, steps = run(args, Path(folder), save_every)
        share = 100 * steps * args.step_ms / 1e3 / (MACHINES * args.seconds)
        name = "members" if save_every == 0 else f"torchrun, saved every {save_every} steps"
        rows.append({"training": name, "kills": kills, "steps": steps, "share": share})
    columns = {
        "training": number("training"),
        "kills": number("kills"),
        "steps of all machines": number("steps"),
        "trained": number("share", "{:.0f} %"),
    }
    title = f"{MACHINES} machines, one killed every {args.kill_every:g} s, {args.seconds:g} s"
    report("members", title, args, at, rows, columns)


# ---- what is compared ------------------------------------------------------------------------------------------------


def _members(args: argparse.Namespace, folder: Path, _: int) -> tuple[int, int]:
    os.environ["RUST_LOG"] = "error"  # read when it is imported
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=60_000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    lives = itertools.count()

    def start(place: int) -> "subprocess.Popen[bytes]":
        name = f"machine-{place}"
        return _start([sys.executable], folder / f"{next(lives)}.steps", args, lighthouse=address, name=name)

    running = [start(place) for place in range(MACHINES)]
    chance, kills, deadline = random.Random(0), 0, _when_trained(folder) + args.seconds
    while time.time() + args.kill_every < deadline:
        time.sleep(args.kill_every)
        place = chance.randrange(MACHINES)
        running[place].kill()
        running[place].wait()
        running[place] = start(place)
        kills += 1
    time.sleep(max(0.0, deadline - time.time()))
    for each in running:
        each.kill()
        each.wait()
    lighthouse.shutdown()
    return kills, sum(_last(file) for file in folder.glob("*.steps"))


def _torchrun(args: argparse.Namespace, folder: Path, save_every: int) -> tuple[int, int]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={MACHINES}"]
    file = folder / "0.steps"
    running = _start(
        [*command, "--max-restarts=1000", "--monitor-interval=0.1"], file, args, folder=str(folder), save=save_every
    )
    chance, kills, deadline = random.Random(0), 0, _when_trained(folder) + args.seconds
    while time.time() + args.kill_every < deadline:
        time.sleep(args.kill_every)
        pids = [int(each.read_text()) for each in folder.glob("*.pid")]
        for pid in [chance.choice(pids)] if pids else []:
            try:
                os.kill(pid, signal.SIGKILL)
                kills += 1
            except ProcessLookupError:  # it restarts right now
                pass
    time.sleep(max(0.0, deadline - time.time()))
    steps = MACHINES * _last(file)
    running.terminate()
    running.wait()
    return kills, steps


def _start(python: list[str], steps: Path, args: argparse.Namespace, **given: Any) -> "subprocess.Popen[bytes]":
    text = json.dumps({"steps": str(steps), "step_s": args.step_ms / 1e3, **given})
    with steps.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([*python, __file__, "--worker", text], stdout=log, stderr=log)


def _when_trained(folder: Path) -> float:
    """Wait until training has begun, which is not measured."""
    deadline = time.time() + 120
    while not any(_last(file) for file in folder.glob("*.steps")):
        if time.time() > deadline:
            raise RuntimeError("".join(each.read_text()[-2000:] for each in folder.glob("*.log")))
        time.sleep(0.1)
    return time.time()


def _last(file: Path) -> int:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return int(lines[-1]) if lines else 0


# ---- a machine -------------------------------------------------------------------------------------------------------


def work(steps: str, step_s: float, lighthouse: str = "", name: str = "", folder: str = "", save: int = 0) -> None:
    """Train for ever. Appends to the file `steps` how many steps are in the weights that all machines have."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    checkpoint, members, rank = Path(folder, "checkpoint.pt"), None, 0
    if lighthouse:
        members = commhooks.Torchft(lighthouse=lighthouse, name=name, timeout_s=20)
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
        model = nn.parallel.DistributedDataParallel(model)
    hook = commhooks.attach(model, commhooks.DiLoCo(sync_every=EVERY), members=members)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count = 0
    if not lighthouse and checkpoint.exists():
        saved = torch.load(checkpoint)
        count = saved["count"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        hook.load_state_dict(saved["hook"])
    generator = torch.Generator().manual_seed(os.getpid())
    with open(steps, "a") as file:
        first = True
        while True:
            began = time.monotonic()
            inputs, targets = torch.randn(32, 256, generator=generator), torch.randint(10, (32,), generator=generator)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            time.sleep(max(0.0, began + step_s - time.monotonic()))
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if hook.stats()["step_in_round"] == 0:
                if lighthouse and first and hook.stats()["members"] > 1:
                    count = 0  # this machine has just come: its first step is lost
                if rank == 0:
                    print(count, file=file, flush=True)
                first = False
            if save and count % save == 0:
                saved = {"count": count, "optimizer": optimizer.state_dict(), "hook": hook.state_dict("mean")}
                if rank == 0:
                    torch.save(saved | {"model": model.state_dict()}, f"{checkpoint}.new")
                    os.replace(f"{checkpoint}.new", checkpoint)


if __name__ == "__main__":
    main()
