"""Lets machines of random speeds come, die every few rounds, and come back: `members` in `make
chaos`.

    python examples/clean_env.py -m tests.stress.chaos --topologies members [--runs 20] [--seed N]

Each run must come to its end in time; after each outer step its machines must have the same weights
and the same progress, and each must have counted with the steps that it has done; and its loss at
the end must be within 1 % of that of a run which was left alone.

    ... --topologies members --busy 20

lets three machines take 100 outer steps among 20 processes that are always busy, with the limits
that users have: none may be declared dead.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import commhooks
from tests.support.machines import Machine, lighthouse

NAMES = ("a", "b", "c")
LATE = "d"
SPEEDS = (1.0, 1.0, 0.5, 0.2)
STEPS, EVERY, STEP_S = 2000, 50, 0.002
OUTER_STEPS = 100
"""Among busy processes."""
LIMIT_S = 240.0
LARGEST_DIFFERENCE = 0.01


# ---- one run -------------------------------------------------------------------------------------


def run(
    folder: Path,
    chance: random.Random | None,
    steps: int = STEPS,
    every: int = EVERY,
    dead_s: float = 3.0,
    timeout_s: float | None = 5.0,
    hold: int | None = None,
) -> dict[str, Any]:
    """Train, with random speeds, deaths at random times, and mostly a fourth machine that comes
    later (None: equal speeds, and nobody comes or dies). `hold`: the outer step after which all
    wait until one has died, so that one does also in a short run. Returns what became of it; the
    loss is not judged yet.
    """
    started = time.monotonic()
    lives = dict.fromkeys((*NAMES, LATE), 0)
    speeds = {name: chance.choice(SPEEDS) if chance else 1.0 for name in lives}
    speeds[NAMES[0]] = 1.0
    late = chance.randint(2, 15) if chance else sys.maxsize
    row = {"deaths": 0, "came": 0, "failures": [], "speeds": sorted(speeds.values())}
    # A machine that is slow, because the host is busy, is waited for.
    with lighthouse(wait_s=60.0, dead_s=dead_s) as address:

        def start(name: str) -> Machine:
            lives[name] += 1
            where = folder / f"{name}{lives[name]}"
            where.mkdir(parents=True)
            given = {"steps": steps, "every": every, "timeout_s": timeout_s, "hold": hold}
            more = {"life": lives[name], "step_s": STEP_S / speeds[name]}
            return Machine(Path(__file__), address, where, name, **given, **more)

        everyone = [start(name) for name in NAMES]
        for machine in everyone:
            machine.wait_for(lambda line: line["what"] == "ready")
        # all begin together; a machine that is started later takes the state of the others
        (folder / "go").touch()
        began = time.monotonic()
        running = {machine.name: machine for machine in everyone}
        away: dict[str, float] = {}  # name -> when it comes back
        next_round = 2
        next_death = float("inf")
        try:
            while not any(map(_end, everyone)) and time.monotonic() < started + LIMIT_S:
                time.sleep(0.05)
                now = time.monotonic()
                # At least one machine that has the state of the training stays.
                there = [machine for machine in running.values() if machine.rounds]
                newest = max((max(machine.rounds) for machine in there), default=0)
                if newest >= late:
                    late = sys.maxsize
                    away[LATE] = now
                if chance is not None and newest >= next_round and next_death == float("inf"):
                    # At any moment of the next round, however fast this host is.
                    next_death = now + chance.uniform(0, 1) * (now - began) / newest
                if chance is not None and len(there) > 1 and now > next_death:
                    next_round = newest + chance.randint(3, 6)
                    next_death = float("inf")
                    dying = chance.choice(there)
                    running.pop(dying.name).kill()
                    away[dying.name] = now + chance.uniform(0, 2)
                    row["deaths"] += 1
                    (folder / "died").touch()
                for name in [name for name, when in away.items() if now > when]:
                    del away[name]
                    running[name] = start(name)
                    everyone.append(running[name])
                for machine in running.values():
                    status = machine.processes[0].poll()
                    assert status in (None, 0), f"{machine.log.read_text()}exit status {status}"
            for machine in running.values():
                if machine.rounds:
                    machine.wait_for(lambda line: line["what"] == "end", 20.0)
        except AssertionError as error:
            row["failures"].append(f"a machine failed: {str(error)[-500:]}")
        finally:
            for machine in everyone:
                machine.kill()
    row["came"] = len([machine for machine in everyone if machine.rounds]) - len(NAMES)
    row["seconds"] = round(time.monotonic() - started, 1)
    return row | _result(everyone, steps // every, row["failures"])


def _end(machine: Machine) -> dict[str, Any] | None:
    return next((line for line in list(machine.lines) if line["what"] == "end"), None)


def _result(machines: list[Machine], outer_steps: int, failures: list[str]) -> dict[str, Any]:
    ends = [end for machine in machines if (end := _end(machine)) is not None]
    if not ends:
        failures.append(
            f"no machine came to the end in {LIMIT_S:g} s"
            if not failures
            else "no machine came to the end"
        )
    by_step: dict[int, list[dict[str, Any]]] = {}
    together = 0
    for machine in machines:
        for step, line in machine.rounds.items():
            by_step.setdefault(step, []).append(line)
            together += len(line["names"]) > 1
    for what in ("weights", "progress"):
        if differing := [
            step for step, lines in by_step.items() if len({line[what] for line in lines}) > 1
        ]:
            failures.append(f"other {what} on other machines after the outer steps {differing}")
    if miscounted := [step for step, lines in by_step.items() if not _counted(lines)]:
        failures.append(f"steps were not counted in the outer steps {miscounted}")
    if not together:
        failures.append("no two machines trained together")
    if missing := set(range(1, outer_steps + 1)) - by_step.keys():
        failures.append(f"nobody took the outer steps {sorted(missing)}")
    if len({(end["weights"], end["step"]) for end in ends}) > 1:
        failures.append("the machines ended with other weights")
    together = [step for step, lines in by_step.items() if len(lines[0]["names"]) >= len(NAMES)]
    apart = sorted(
        step for step in by_step if step > min(together, default=0) and step not in together
    )
    loss = ends[0]["loss"] if ends else float("nan")
    return {"rounds": len(by_step), "loss": loss, "apart": apart}


def _counted(lines: list[dict[str, Any]]) -> bool:
    """Return whether each machine has counted in an outer step with the steps that it has done. A
    machine that has died since said nothing; one that has taken a state had no steps.
    """
    trained = [line for line in lines if line["steps"] is not None]
    weights = [line["share"] / line["steps"] for line in trained]
    return sum(line["share"] for line in trained) < 1 + 1e-6 and all(
        abs(weight / weights[0] - 1) < 1e-6 for weight in weights
    )


# ---- the campaign --------------------------------------------------------------------------------


def campaign(runs: int, seed: int, console: Console, steps: int = STEPS) -> int:
    """Run and print all. Returns how many failed."""
    folder = Path(tempfile.mkdtemp(prefix="commhooks-chaos-"))
    alone = run(folder / "alone", None, steps)
    console.print(
        f"left alone: loss {alone['loss']:.5f}, {alone['seconds']} s {'; '.join(alone['failures'])}"
    )
    table = Table(
        "run", "speeds", "deaths", "came back", "rounds", "s", "loss", "difference", "failures"
    )
    rows = []
    for number in range(runs):
        row = run(folder / str(number), random.Random(f"{seed} {number}"), steps)
        difference = row["loss"] / alone["loss"] - 1
        if not abs(difference) <= LARGEST_DIFFERENCE:
            row["failures"].append(f"the loss differs by {difference:.2%}")
        if not row["deaths"]:
            row["failures"].append("none died")
        rows.append(row | {"difference": difference})
        shown = (row[name] for name in ("speeds", "deaths", "came", "rounds", "seconds"))
        failures = "; ".join(row["failures"]) or "-"
        table.add_row(
            str(number), *map(str, shown), f"{row['loss']:.5f}", f"{difference:+.3%}", failures
        )
        console.print(
            f"{number}: {row['deaths']} deaths, {row['seconds']} s, {difference:+.3%} {failures}"
        )
    console.print(table)
    failed = sum(bool(row["failures"]) for row in rows) + bool(alone["failures"])
    deaths = sum(row["deaths"] for row in rows)
    largest = max(abs(row["difference"]) for row in rows)
    console.print(
        f"seed {seed}: {runs} runs, {deaths} deaths, largest difference {largest:.3%}, {failed}"
        " failed"
    )
    if failed:
        console.print(f"Outputs are in {folder}")
    return failed


def among_busy_processes(busy: int, console: Console, outer_steps: int = OUTER_STEPS) -> int:
    """Let nobody die. Return whether a machine was declared dead all the same, or more failed."""
    folder = Path(tempfile.mkdtemp(prefix="commhooks-chaos-"))
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(busy)]
    try:
        every = 10
        row = run(folder, None, every * outer_steps, every, dead_s=5.0, timeout_s=None)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if row["apart"]:
        row["failures"].append(f"not all machines took part after the outer steps {row['apart']}")
    failures = "; ".join(row["failures"]) or "none was declared dead"
    console.print(
        f"{row['rounds']} outer steps, {busy} busy processes, {row['seconds']} s: {failures}"
    )
    return int(bool(row["failures"]))


# ---- a machine -----------------------------------------------------------------------------------


def job(settings: dict[str, Any]) -> None:
    """Learn to classify, from independent samples on each machine. The problem is convex, so that
    the loss at the end depends little on how many machines have trained (measured: 0.2 % between
    one and three), and so ill-conditioned that half of the training costs 6 %.
    """
    torch.manual_seed(0)
    model = nn.Linear(16, 5)
    inputs = torch.randn(4096, 16) * torch.logspace(0, -1, 16)
    targets = torch.distributions.Categorical(logits=inputs @ torch.randn(16, 5) * 2).sample()
    _say("ready")
    folder = Path(settings["folder"]).parent
    while not (folder / "go").exists():
        time.sleep(0.01)
    members = commhooks.Torchft(name=settings["name"], timeout_s=settings["timeout_s"])
    options = commhooks.DiLoCo(sync_every=settings["every"], wire="int4", lr_factor=1.0)
    hook = commhooks.attach(model, options, members=members)
    assert hook.members is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings["steps"])
    hook.members.register("scheduler", scheduler.state_dict, scheduler.load_state_dict)
    chance = torch.Generator().manual_seed(1000 * ord(settings["name"]) + settings["life"])
    before = steps = 0
    while before < settings["steps"] // settings["every"]:
        batch = torch.randint(len(inputs), (64,), generator=chance)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        time.sleep(settings["step_s"])
        optimizer.step()
        scheduler.step()
        steps += 1
        stats = hook.stats()
        if stats["step"] > before and stats["step_in_round"] == 0:
            counts = before > 0 and stats["step"] == before + 1
            before = stats["step"]
            _say(
                "round",
                step=before,
                names=hook.members.names,
                weights=_hash(model),
                progress=scheduler.last_epoch,
                steps=steps if counts else None,
                share=stats["members_weight"],
            )
            steps = 0
        while before == settings["hold"] and not (folder / "died").exists():
            time.sleep(0.01)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(inputs), targets))
    _say("end", step=before, loss=loss, weights=_hash(model))
    sys.stdout.flush()
    os._exit(0)


def _say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


def _hash(model: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    ).hexdigest()[:16]


if __name__ == "__main__":
    torch.set_num_threads(1)
    job(json.loads(sys.argv[1]))
