"""Kills trainings again and again: do they go on by themselves, to the same weights?

    python examples/clean_env.py -m tests.stress.chaos [--kills 30] [--seed N]          # what `make chaos` runs

Trainings with plain torch (PowerSGD, int8, PowerSGD between two nodes of two ranks, and a choice by auto), FSDP2,
Lightning, Accelerate, and FSDP2 of Accelerate and of transformers' Trainer (chaos_training.py), each on two ranks
(nodes and FSDP2 on four) under `torchrun --max-restarts`. In each attempt one rank is killed by SIGKILL: at a random
time, or at a phase that is easily missed. The final weights must be those of a training that was left alone, bit for
bit. The exit status is 1 if a training hung, did not resume, went back further than its last checkpoint, or ended in
other weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).resolve().with_name("chaos_training.py")
TESTS = SCRIPT.parents[1]
FRAMEWORKS = (
    *("plain", "int8", "diloco", "nodes", "auto", "fsdp2", "lightning", "accelerate"),
    *("accelerate-fsdp2", "trainer-fsdp2"),
)
END_BY_THEMSELVES = ("plain", "int8", "diloco", "nodes", "auto")  # the others' frameworks end the surviving ranks
RANKS = {"nodes": 4, "fsdp2": 4, "accelerate-fsdp2": 4, "trainer-fsdp2": 4}  # two elsewhere
SAVE_EVERY = 5  # as in the script
GROUP_TIMEOUT_S = 20  # as in the script
ATTEMPT_LIMIT_S = 60  # starting Python and the framework twice on a busy machine, and the group's timeout
KILLS_PER_RUN = 5


@dataclass(frozen=True)
class Kill:
    """What the script noted about one kill and what came after it."""

    rank: int
    phase: str
    step: int
    by_timer: bool
    last_issued: str | None
    resumed_at: int | None
    """The step at which the next attempt began to train; None if no attempt did."""
    survivor: dict[str, Any] | None
    """The error that ended the other rank, with `seconds` after the kill; None where torchrun was faster."""

    @property
    def steps_again(self) -> int | None:
        """Steps that were done and had to be done again."""
        return None if self.resumed_at is None else max(0, self.step - self.resumed_at)


@dataclass(frozen=True)
class Outcome:
    """What became of a training."""

    framework: str
    seconds: float
    kills: list[Kill]
    failures: list[str]
    final: list[dict[str, Any]] = field(repr=False)
    training_s: float = 0.0
    output: str = field(default="", repr=False)


def run(framework: str, folder: Path, kills: list[dict[str, Any]], steps: int, python: str = sys.executable) -> Outcome:
    """A training with the kills that are planned, to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {
        "CHAOS_KILLS": json.dumps(kills),
        "CHAOS_STEPS": str(steps),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS.parent),
        # torch 2.13's torchrun lets all attempts share one store, where gloo finds the addresses of ranks that are dead
        # ("connectFullMesh failed ... Connection refused"), with a hook or without.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += [f"--nproc-per-node={RANKS.get(framework, 2)}"]
    command += [f"--max-restarts={len(kills)}", "--monitor-interval=0.1", str(SCRIPT), framework, str(folder)]
    started = time.monotonic()
    failures = []
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            status = process.wait(ATTEMPT_LIMIT_S * (1 + len(kills)))
            if status != 0:
                failures.append(f"exit status {status}")
        except subprocess.TimeoutExpired:
            failures.append(f"hung: not done after {ATTEMPT_LIMIT_S * (1 + len(kills))} s")
        finally:
            _kill_all(process)
    seconds = time.monotonic() - started
    done = _kills(folder, len(kills))
    failures += [f"attempt {i}: {text}" for i, kill in enumerate(done) if (text := _wrong(kill, framework))]
    paths = [folder / f"final-{rank}.pt" for rank in range(RANKS.get(framework, 2))]
    final = [torch.load(path, weights_only=True) for path in paths if path.exists()]
    if len(final) == len(paths):
        if not all(torch.equal(final[0]["weights"], each["weights"]) for each in final):
            failures.append("the ranks ended in different weights")
        if any(
            each["stats"]["so_far"]["backward_passes"] != steps or not each["stats"]["compressed_steps"]
            for each in final
        ):
            failures.append(f"not {steps} steps, or none compressed")
    else:
        failures.append("no final weights")
    training_s = _note(folder, f"end-{len(done)}-0", "time", 0.0) - _note(folder, f"start-{len(done)}-0", "time", 0.0)
    text = (folder / "output.txt").read_text(errors="replace")
    return Outcome(framework, seconds, done, failures, final, training_s, text)


def compare(outcome: Outcome, uncompressed: torch.Tensor) -> Outcome:
    """With a failure more if the weights are not those of the training that was left alone."""
    if outcome.final and not torch.equal(outcome.final[0]["weights"], uncompressed):
        inexact = " (a checkpoint was marked inexact)" if "inexact" in outcome.output else ""
        outcome.failures.append("other weights than the training that was left alone" + inexact)
    return outcome


def _kills(folder: Path, planned: int) -> list[Kill]:
    """The kills that took place: a training may be over before the time of the next one."""
    kills = []
    for attempt in range(planned):
        path = folder / f"killed-{attempt}.json"
        if not path.exists():
            break
        note = json.loads(path.read_text())
        error = folder / f"error-{attempt}-{1 - note['rank']}.json"
        survivor = None
        if error.exists():
            survivor = json.loads(error.read_text())
            survivor["seconds"] = survivor["time"] - note["time"]
        # An attempt that was killed before it trained is followed by another one.
        starts = [_note(folder, f"start-{later}-0", "step", None) for later in range(attempt + 1, planned + 1)]
        resumed_at = next((step for step in starts if step is not None), None)
        known = {name: note[name] for name in ("rank", "phase", "step", "by_timer", "last_issued")}
        kills.append(Kill(**known, resumed_at=resumed_at, survivor=survivor))
    return kills


def _wrong(kill: Kill, framework: str) -> str:
    if kill.resumed_at is None:
        return "never resumed"
    # A kill while saving loses this checkpoint, and the one before is so far back.
    if kill.phase != "start" and kill.steps_again is not None and kill.steps_again > SAVE_EVERY:
        return f"killed at step {kill.step}, resumed at {kill.resumed_at}: further back than the last checkpoint"
    if framework in END_BY_THEMSELVES and kill.phase not in ("start", "end"):
        if kill.survivor is None:
            return "the other rank did not end by itself"
        if kill.survivor["seconds"] > GROUP_TIMEOUT_S + 5:
            return f"the other rank ended {kill.survivor['seconds']:.0f} s later"
    return ""


def _note(folder: Path, name: str, key: str, default: Any) -> Any:
    path = folder / f"{name}.json"
    return json.loads(path.read_text())[key] if path.exists() else default


def _kill_all(process: subprocess.Popen[Any]) -> None:
    """torchrun and its workers, which have a session each."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    if process.poll() is None:
        process.kill()
    for each in tree:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


# -------------------------------------------------------------------------------------------------------- the campaign


def plan(generator: random.Random, steps: int, training_s: float) -> dict[str, Any]:
    """One kill: at any time, or in one of the phases."""
    rank = generator.randrange(2)
    phase = generator.choice(["", "", "", "backward", "save", "start"])
    if not phase:
        return {"rank": rank, "after_s": round(generator.uniform(0, training_s / 2), 3)}
    # The main rank writes in Lightning and in the plain script.
    return {"rank": 0 if phase == "save" else rank, "phase": phase, "step": generator.randrange(steps // 2)}


def campaign(
    frameworks: Sequence[str], kills: int, seed: int, steps: int, folder: Path, console: Console
) -> list[Outcome]:
    generator = random.Random(seed)
    outcomes = []
    for number, framework in enumerate(frameworks):
        wanted = kills // len(frameworks) + (number < kills % len(frameworks))
        console.print(f"{framework}: left alone ...")
        alone = run(framework, folder / framework / "alone", [], steps)
        outcomes.append(alone)
        if alone.failures:
            continue
        uncompressed, done = alone.final[0]["weights"], 0
        for attempt in range(2 * wanted):
            planned = [plan(generator, steps, alone.training_s) for _ in range(min(KILLS_PER_RUN, wanted - done))]
            if not planned:
                break
            console.print(f"{framework}: {len(planned)} kills ...")
            outcome = compare(run(framework, folder / framework / str(attempt), planned, steps), uncompressed)
            outcomes.append(outcome)
            done += len(outcome.kills)
            for failure in outcome.failures:
                console.print(f"  {failure}; see {folder / framework / str(attempt)}", style="bold red")
        if done < wanted:
            outcomes[-1].failures.append(f"{done} kills of {wanted} took place")
    return outcomes


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table("framework", "kill at", "rank", "step", "resumed at", "steps again", "other rank ended by", "outcome")
    for outcome in outcomes:
        result = "same weights" if not outcome.failures else "; ".join(outcome.failures)
        if not outcome.kills:
            continue
        for kill in outcome.kills:
            moment = f"{'random time: ' if kill.by_timer else ''}{kill.phase}"
            ended = "torchrun"
            if kill.survivor is not None:
                ended = f"{kill.survivor['type']}, {kill.survivor['seconds']:.1f} s"
            again = "-" if kill.phase == "start" else str(kill.steps_again)
            table.add_row(
                outcome.framework,
                moment,
                str(kill.rank),
                "-" if kill.phase == "start" else str(kill.step),
                str(kill.resumed_at),
                again,
                ended,
                result,
            )
        table.add_section()
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--seed", type=int, default=None, help="of the times and phases (default: a new one)")
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    console = Console(width=150, highlight=False)
    console.print(f"seed {seed}: the same kills again with ARGS='--seed {seed}'")
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="commhooks-chaos-"))
    outcomes = campaign(args.frameworks, args.kills, seed, args.steps, folder, console)
    show(outcomes, console)
    failures = [f"{outcome.framework}: {text}" for outcome in outcomes for text in outcome.failures]
    count = sum(len(outcome.kills) for outcome in outcomes)
    console.print(f"{count} kills in {time.monotonic() - started:.0f} s, {len(failures)} failures")
    for failure in failures:
        console.print(f"FAILED: {failure}", style="bold red")
    if failures:
        console.print(f"Notes, checkpoints and outputs are in {folder}")
    return 1 if failures or count < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
