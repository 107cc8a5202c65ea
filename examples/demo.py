"""Trains over a slow link with and without a hook, kills a training and resumes it. `make demo`
runs it.

Exits 1 if a hook is not faster, loses accuracy or does not send less, or if the resumed training
ends with other bits.

    python examples/clean_env.py examples/demo.py

Runs four trainings by `lightning_digits.py`, one after the other, each on two processes, whose
connection `slow_link.py` slows down (without root, on Linux):

    allreduce   plain averaging, the baseline
    auto        int8, bf16 or plain averaging, whichever is fastest
    diloco      the processes exchange weights every ten steps
    killed      diloco again: all processes are killed within an epoch, and the same command is run
                again; the final weights must be bit-equal to the uninterrupted run
"""

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import clean_env
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SCRIPT = Path(__file__).with_name("lightning_digits.py")
TRAINING_LIMIT_S = 240
LESS = 20  # times less than all-reduce must diloco send
console = Console(highlight=False, soft_wrap=True)


# ---- what the demo checks ------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The results of the trainings. The dicts are the `result.json` files of
    `lightning_digits.py`.
    """

    allreduce: dict[str, Any]
    auto: dict[str, Any]
    diloco: dict[str, Any]
    resumed: dict[str, Any]
    saved_steps: int
    """Steps in the newest checkpoint when the training was killed."""
    different_weights: list[str]
    """Names of the weights that differ between the uninterrupted and the resumed run."""


def failures(outcome: Outcome, max_loss_points: float) -> list[str]:
    """The failed checks, one sentence each.

    Args:
        max_loss_points: by how many percentage points a hook's test accuracy may be below
            all-reduce's.
    """
    sentences = []
    for name, result in (("auto", outcome.auto), ("diloco", outcome.diloco)):
        loss_points = 100 * (outcome.allreduce["test_accuracy"] - result["test_accuracy"])
        if not loss_points <= max_loss_points:
            sentences.append(
                f"{name} is {loss_points:.2f} points below all-reduce, more than"
                f" {max_loss_points:g}"
            )
    less = outcome.allreduce["stats"]["bytes_sent"] / outcome.diloco["stats"]["bytes_sent"]
    if less < LESS:
        sentences.append(f"diloco sent {less:.1f} times less, not {LESS} times")
    if (
        outcome.allreduce["slow_connections"]
        and outcome.diloco["seconds"] > outcome.allreduce["seconds"]
    ):
        sentences.append("diloco took longer than all-reduce")
    return sentences + failures_after_the_kill(
        outcome.resumed, outcome.saved_steps, outcome.different_weights
    )


def failures_after_the_kill(
    resumed: dict[str, Any], saved_steps: int, differ: list[str]
) -> list[str]:
    """The failed checks of the resumed training; the arguments are as in `Outcome`."""
    sentences = []
    # A run that restarts from the beginning reaches the same weights, so check separately that it
    # has resumed.
    trained = resumed["stats"]["backward_passes"]
    missing = resumed["global_step"] - saved_steps
    if trained != missing:
        sentences.append(
            f"it did not resume: after the kill it trained {trained} steps, where {missing} were"
            " missing"
        )
    if differ:
        sentences.append(f"the weights differ after the kill: {', '.join(differ)}")
    return sentences


def different_weights(folder: Path, other: Path) -> list[str]:
    """Names of the weights in the last checkpoints of two trainings that are missing in one or
    differ in any bit.
    """
    ours, theirs = (
        torch.load(path / "last.ckpt", map_location="cpu", weights_only=True)["state_dict"]
        for path in (folder, other)
    )
    return different_tensors(ours, theirs)


def different_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are missing in one or differ in any bit."""
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or _bits(ours[name]) != _bits(theirs[name])
    ]


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.numpy().tobytes()


# ---- a training ----------------------------------------------------------------------------------


class TrainingFailed(Exception):
    """A training failed; the message ends with the last lines of its output."""


@dataclass(frozen=True)
class Training:
    """A training command with its folder and the environment of its processes."""

    title: str
    folder: Path
    command: list[str]
    env: dict[str, str]
    epochs: int

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the content of `result.json`."""
        with self._started() as process:
            for _ in self._watched(process, every_s=0.1):
                pass
        if process.returncode != 0:
            raise self._failed(f"exit status {process.returncode}")
        return json.loads((self.folder / "result.json").read_text())

    def run_and_kill(self, after_steps: int, steps_per_epoch: int) -> int:
        """Train, and kill all processes after at least `after_steps` steps, inside an epoch;
        returns the steps done.
        """
        with self._started() as process:
            for done in self._watched(process, every_s=0.01):
                if done < after_steps:
                    continue
                # Stop the processes and check again: the epoch could end between the check and the
                # kill.
                self._send(process, signal.SIGSTOP)
                done = self._steps_done()
                if (
                    done < self.epochs * steps_per_epoch
                    and 0 < done % steps_per_epoch < steps_per_epoch - 1
                ):
                    self._send(process, signal.SIGKILL)
                    return done
                self._send(process, signal.SIGCONT)
        raise self._failed(
            f"it ended with exit status {process.returncode} before it could be killed"
        )

    def run_kill_and_resume(self, steps_per_epoch: int) -> tuple[int, dict[str, Any]]:
        """Kill it within an epoch and give the same command again; returns the steps in the newest
        checkpoint at the kill, and the content of `result.json`.
        """
        # early, so that a slow look is not too late
        within = self.epochs // 2 * steps_per_epoch + steps_per_epoch // 4
        epoch, step = divmod(self.run_and_kill(within, steps_per_epoch), steps_per_epoch)
        console.print(
            f"SIGKILL to all its processes after step {step} of {steps_per_epoch} in epoch"
            f" {epoch + 1}."
        )
        return epoch * steps_per_epoch, replace(self, title="the same command again").run()

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the first process; the others are its children in the same process group. All are
        ended on exit.
        """
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "output.txt", "ab") as output:
            process = subprocess.Popen(
                self.command,
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            self._send(process, signal.SIGKILL)
            process.wait()

    def _send(self, process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
        """Send a signal to all running processes of the training."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)

    def _watched(self, process: subprocess.Popen[bytes], every_s: float) -> Iterator[int]:
        """Yield the number of steps done every `every_s` seconds until the process has ended; shows
        a progress bar.
        """
        limit = time.monotonic() + TRAINING_LIMIT_S
        columns = (
            TextColumn(f"{self.title:<22}"),
            BarColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(self.title, total=self.epochs, note="starting")
            while process.poll() is None:
                if time.monotonic() > limit:
                    raise self._failed(f"not done after {TRAINING_LIMIT_S} s")
                row = self._last_row()
                if row:
                    epoch = int(row["epoch"]) + 1
                    progress.update(bar, completed=epoch, note=f"epoch {epoch} of {self.epochs}")
                    yield int(row["step"]) + 1
                time.sleep(every_s)

    def _steps_done(self) -> int:
        return int(self._last_row()["step"]) + 1

    def _last_row(self) -> dict[str, str]:
        """The last training step in the newest log; empty if there is none yet."""
        logs = sorted(
            self.folder.glob("log/version_*/metrics.csv"), key=lambda log: int(log.parent.name[8:])
        )
        lines = logs[-1].read_text().splitlines(keepends=True) if logs else []
        # the last line may be incomplete
        rows = csv.DictReader(line for line in lines if line.endswith("\n"))
        steps = [row for row in rows if row["loss"]]
        return steps[-1] if steps else {}

    def _failed(self, what: str) -> TrainingFailed:
        output = (
            (self.folder / "output.txt")
            .read_text(errors="replace")
            .replace("\r", "\n")
            .splitlines()
        )
        return TrainingFailed("\n".join([f"{self.title}: {what}; its last lines:", *output[-40:]]))


# ---- the demo ------------------------------------------------------------------------------------


def run_demo(args: argparse.Namespace, folder: Path, env: dict[str, str]) -> list[str]:
    """Run all trainings and print the results; returns the failed checks."""

    def training(title: str, name: str, hook: str, options: dict[str, Any] | None) -> Training:
        command = [sys.executable, str(SCRIPT), f"--hook={hook}", f"--folder={folder / name}"]
        command += [f"--epochs={args.epochs}", f"--seed={args.seed}", f"--mbit={args.mbit}"]
        command += [f"--hook-options={json.dumps(options)}"] if options else []
        return Training(title, folder / name, command, env, args.epochs)

    options = {"sync_every": 10}
    plain = training("allreduce", "allreduce", "allreduce", None).run()
    auto = training("auto", "auto", "auto", None).run()
    diloco = training("diloco", "diloco", "diloco", options).run()
    chosen = auto["stats"]["chosen"] or "undecided"
    show_table(
        {"plain all-reduce": plain, f"auto ({chosen})": auto, "diloco, every 10 steps": diloco}
    )
    if not plain["slow_connections"]:
        console.print("The link was not limited: this system cannot do it without root; Linux can.")

    killed = training("diloco, to be killed", "killed", "diloco", options)
    saved_steps, resumed = killed.run_kill_and_resume(diloco["global_step"] // args.epochs)
    differ = different_weights(folder / "diloco", folder / "killed")
    console.print(
        f"It trained the last {resumed['stats']['backward_passes']} of {resumed['global_step']}"
        " steps. Final weights bit-equal to those of the uninterrupted run:"
        f" {'NO' if differ else 'yes'}\n"
    )
    return failures(
        Outcome(plain, auto, diloco, resumed, saved_steps, differ), args.max_loss_points
    )


def show_table(results: dict[str, dict[str, Any]]) -> None:
    table = Table(box=MARKDOWN)
    table.add_column("hook", no_wrap=True)
    for column in (
        "seconds",
        "times faster",
        "test loss",
        "test accuracy",
        "MB sent per rank",
        "times less",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    first = next(iter(results.values()))
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['seconds']:.1f}",
            f"{first['seconds'] / result['seconds']:.1f}",
            f"{result['test_loss']:.3f}",
            f"{result['test_accuracy']:.1%}",
            f"{result['stats']['bytes_sent'] / 1e6:.1f}",
            f"{first['stats']['bytes_sent'] / result['stats']['bytes_sent']:.1f}",
        )
    Console(width=120, highlight=False).print(table)  # one line per row on every terminal


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15, help="of each training (15)")
    parser.add_argument(
        "--mbit", type=float, default=40, help="speed of the slowed connection, Mbit/s (40)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all trainings (0)")
    parser.add_argument(
        "--max-loss-points", type=float, default=2, help="of accuracy, in percentage points (2)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_to_a_verdict(
        arguments(), argv, run_demo, "speed, accuracy, bytes sent, exact resume"
    )


def run_to_a_verdict(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    run: Callable[[argparse.Namespace, Path, dict[str, str]], list[str]],
    promises: str,
) -> int:
    """Print the failed checks that `run` returns, or that all `promises` held; returns the exit
    status.
    """
    args = parser.parse_args(argv)
    if args.epochs < 2:
        parser.error("--epochs must be 2 or more: the kill comes after the first checkpoint")

    # end the trainings, too
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    folder = Path(tempfile.mkdtemp(prefix="commhooks-demo-"))
    with tempfile.TemporaryDirectory(prefix="commhooks-hf-") as hf_home:
        try:
            sentences = run(args, folder, clean_env.cleaned(os.environ, hf_home))
        except TrainingFailed as failure:
            sentences = [str(failure)]
    for sentence in sentences:
        console.print(f"FAILED: {sentence}", style="bold red", markup=False)
    if sentences:
        console.print(f"Checkpoints, logs and outputs are in {folder}", markup=False)
        return 1
    shutil.rmtree(folder)
    console.print(f"All checks passed: {promises}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
