"""Start one run, kill it, start it again, and judge what it has become."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.stress.chaos_cases import (
    COMMAND_AGAIN,
    GROUP_TIMEOUT_S,
    SAVE_EVERY,
    Case,
    Death,
    complete_checkpoints,
    files_with_the_hook,
)
from tests.support.repository import PYTHONPATH

SCRIPT = Path(__file__).resolve().with_name("chaos_training.py")
COMMAND_LIMIT_S = (
    120  # starting Python and the framework twice on a busy machine, and the group's timeout
)

# the reason that the operating system gives where files may not grow; see chaos_watch.py
FULL = "File too large"
NO_RESIDUALS = "all ranks start from residuals of zero"
UNREADABLE = ("is cut off", "cannot be read", "counts as missing")
REFUSED, WITHOUT_RESIDUALS = "refused", "without residuals"
"""How a start from a damaged checkpoint may end."""


@dataclass
class Outcome:
    """What became of a case."""

    case: Case
    seconds: float = 0.0
    died_in: str = ""
    """The phase that rank `death.rank` was in."""
    died_at: int | None = None
    """The step; None if the death did not take place."""
    last_issued: str | None = None
    resumed_at: int | None = None
    """The step at which the last attempt began to train; None if none did."""
    survivors: list[dict[str, Any]] = field(default_factory=list)
    """The errors that ended other ranks in the first attempt, with `seconds` after the death."""
    message: str = ""
    """`truncated`: how a start from the damaged checkpoint ended: one of the two above; "" if
    nothing was said.
    """
    difference: float = 0.0
    """From the weights of the twin, relative."""
    failures: list[str] = field(default_factory=list)
    final: list[dict[str, Any]] = field(default_factory=list, repr=False)
    output: str = field(default="", repr=False)

    @property
    def steps_again(self) -> int | None:
        """Steps that were done and had to be done again."""
        if self.resumed_at is None or self.died_at is None:
            return None
        return max(0, self.died_at - self.resumed_at)


def run(case: Case, folder: Path, python: str = sys.executable) -> Outcome:
    """Train `case` to its end: killed once, then started again. It is not judged yet."""
    folder.mkdir(parents=True)
    outcome = Outcome(case)
    death = case.death
    started = time.monotonic()
    command = Command(case, folder, python)
    status = command.run(death, restarts=0 if death.kind in COMMAND_AGAIN else 1)
    if death.kind in COMMAND_AGAIN and status == 0:
        outcome.failures.append("the first command came to its end")
    elif death.kind in COMMAND_AGAIN and (folder / "death.json").exists():
        damaged = _truncate_newest(folder, death) if death.kind == "truncated" else None
        status = command.run()
        if damaged is not None:
            outcome.message = _what_it_said(status, command.outputs[-1], case, damaged)
            if status != 0 and outcome.message:
                _remove(complete_checkpoints(folder)[-1])
                status = command.run()
    outcome.seconds = time.monotonic() - started
    outcome.output = "\n".join(command.outputs)
    if status != 0:
        outcome.failures.append("hung" if status is None else f"exit status {status}")
    _read_notes(outcome, folder)
    paths = [folder / f"final-{rank}.pt" for rank in range(case.combination.ranks)]
    outcome.final = [torch.load(path, weights_only=True) for path in paths if path.exists()]
    return outcome


class Command:
    """torchrun with the training of a case, given several times."""

    def __init__(self, case: Case, folder: Path, python: str) -> None:
        self.folder = folder
        self.outputs = list[str]()
        combination = case.combination
        self._words = [
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
        ]
        self._words += [f"--nproc-per-node={combination.ranks}", "--monitor-interval=0.1"]
        self._script = [str(SCRIPT), combination.front, combination.topology, combination.hook]
        self._script += [str(combination.steps), str(folder)]

    def run(self, death: Death | None = None, restarts: int = 0) -> int | None:
        """The exit status; None if it hung. In the first attempt the ranks know of `death`."""
        env = os.environ | {
            "CHAOS_COMMAND": str(len(self.outputs)),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHONPATH,
            # torch 2.13's torchrun lets all attempts share one store, where gloo finds the
            # addresses of ranks that are dead ("connectFullMesh failed ... Connection refused"),
            # with a hook or without.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if death is not None:
            env["CHAOS_DEATH"] = json.dumps(asdict(death))
        words = [*self._words, f"--max-restarts={restarts}", *self._script]
        # A pipe and no file: what is printed would meet the limit of a full disk.
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        try:
            return self._wait(process, death)
        finally:
            kill_all(process)
            reader.join(5)
            self.outputs.append("".join(lines))

    def _wait(self, process: subprocess.Popen[str], death: Death | None) -> int | None:
        act = _ACTS.get(death.kind) if death is not None else None
        deadline = time.monotonic() + COMMAND_LIMIT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                return None
            if act is not None and (self.folder / "death.json").exists():
                act(process)
                act = None
            time.sleep(0.01)
        return process.returncode


def kill_all(process: subprocess.Popen[Any]) -> None:
    """torchrun and its workers, which have a session each."""
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    if process.poll() is None:
        process.kill()
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()


_ACTS: dict[str, Callable[[subprocess.Popen[Any]], None]] = {
    "all": kill_all,
    "truncated": kill_all,
    "sigterm": lambda process: process.send_signal(signal.SIGTERM),
}
"""What is done to torchrun when the ranks have noted that it is time. Other deaths a rank brings
about itself.
"""


# ---- a damaged checkpoint ------------------------------------------------------------------------


def _truncate_newest(folder: Path, death: Death) -> Path:
    files = files_with_the_hook(complete_checkpoints(folder)[-1])
    path = files[death.pick % len(files)]
    os.truncate(path, path.stat().st_size // 2)
    return path


def _what_it_said(status: int | None, output: str, case: Case, damaged: Path) -> str:
    """Return how a start from a damaged checkpoint ended; "" if nothing was reported."""
    named = damaged.name in output or damaged.parent.name in output
    if status == 0:
        return WITHOUT_RESIDUALS if named and NO_RESIDUALS in output else ""
    # In plain torch the script reads the file by itself: the error is torch's.
    return (
        "refused"
        if case.combination.front == "plain"
        or (named and any(text in output for text in UNREADABLE))
        else ""
    )


def _remove(checkpoint: Path) -> None:
    """As the user does whom the error has told that it is damaged."""
    checkpoint.rename(checkpoint.with_name(f"damaged {checkpoint.name}"))


# ---- judging -------------------------------------------------------------------------------------


def _read_notes(outcome: Outcome, folder: Path) -> None:
    def read(name: str) -> dict[str, Any] | None:
        path = folder / name
        return json.loads(path.read_text()) if path.exists() else None

    note = read("death.json")
    if note is None:
        return
    outcome.died_in = note["phase"]
    outcome.died_at = note["step"]
    outcome.last_issued = note["last_issued"]
    for later in (1, 2):
        if (start := read(f"start-{later}-0.json")) is not None:
            outcome.resumed_at = start["step"]
    for rank in range(outcome.case.combination.ranks):
        if (error := read(f"error-0-{rank}.json")) is not None and rank != outcome.case.death.rank:
            outcome.survivors.append(
                {
                    "type": error["type"],
                    "text": error["text"],
                    "seconds": error["time"] - note["time"],
                }
            )


def judge(outcome: Outcome, twin: torch.Tensor) -> Outcome:
    """Adds what is wrong to `failures`. `twin`: the weights that chaos_twins.py has for it."""
    outcome.failures += [*_wrong_notes(outcome), *_wrong_results(outcome, twin)]
    return outcome


def _wrong_notes(outcome: Outcome) -> list[str]:
    death, combination = outcome.case.death, outcome.case.combination
    if outcome.died_at is None:
        return ["the death did not take place"]
    if outcome.resumed_at is None or outcome.steps_again is None:
        return ["never resumed"]
    wrong = []
    # A death while saving loses this checkpoint, and the one before is so far back.
    allowed = SAVE_EVERY * (2 if death.kind == "truncated" and outcome.message == REFUSED else 1)
    if outcome.steps_again > allowed:
        wrong.append(
            f"died at step {outcome.died_at}, resumed at {outcome.resumed_at}: further back than"
            " the last checkpoint"
        )
    if death.kind == "truncated" and not outcome.message:
        wrong.append("nothing was said of the damaged file")
    if death.kind == "full" and FULL not in outcome.output:
        wrong.append("the reason, a full disk, was not given")
    # With other front ends torchrun is faster.
    if (
        death.kind == "one"
        and combination.front == "plain"
        and outcome.died_in not in ("start", "end")
    ):
        if not outcome.survivors:
            wrong.append("no other rank ended by itself")
        slowest = max((error["seconds"] for error in outcome.survivors), default=0.0)
        if slowest > GROUP_TIMEOUT_S + 5:
            wrong.append(f"another rank ended {slowest:.0f} s later")
    return wrong


def _wrong_results(outcome: Outcome, twin: torch.Tensor) -> list[str]:
    if len(outcome.final) < outcome.case.combination.ranks:
        return ["no final weights"]
    wrong = []
    steps = outcome.case.combination.steps
    weights = outcome.final[0]["weights"]
    if not all(torch.equal(weights, row["weights"]) for row in outcome.final):
        wrong.append("the ranks ended in different weights")
    for row in outcome.final:
        stats = row["stats"]
        if stats["so_far"]["backward_passes"] != steps or not stats["compressed_steps"]:
            wrong.append(f"not {steps} steps, or none compressed")
            break
    outcome.difference = float((weights - twin).norm() / twin.norm())
    if not torch.equal(weights, twin):
        inexact = " (a checkpoint was marked inexact)" if "inexact" in outcome.output else ""
        wrong.append(f"other weights than the training that was left alone{inexact}")
    return wrong
