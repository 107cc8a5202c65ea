"""What `make demo-accelerate` runs: does a training with Accelerate survive a kill, the hook's memory included?

    python examples/clean_env.py examples/accelerate_demo.py

Runs two trainings by `accelerate_digits.py`, one after the other, each on two processes with a checkpoint at the end of
each epoch. The first runs to its end. All processes of the second are killed in the middle of an epoch, and the same
command is run again. Exits with 1 unless the final weights of both are bitwise equal and steps were compressed.
"""

import argparse
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from demo import Training, console, different_tensors, failures_after_the_kill, run_to_a_verdict

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "accelerate_commhooks", "launch"]
COMMAND += ["--config_file", str(HERE / "accelerate_config.yaml"), str(HERE / "accelerate_digits.py")]


def failures(whole: dict[str, Any], resumed: dict[str, Any], saved_steps: int, differ: list[str]) -> list[str]:
    """The failed checks, one sentence each.

    Args:
        whole, resumed: the `result.json` of the two trainings.
        saved_steps: steps in the newest checkpoint when the training was killed.
        differ: names of the weights that are not bit-equal.
    """
    found = []
    for name, result in (("the uninterrupted training", whole), ("the resumed training", resumed)):
        if not result["stats"]["compressed_steps"]:
            found.append(f"{name}: no step was compressed")
    return found + failures_after_the_kill(resumed, saved_steps, differ)


@dataclass(frozen=True)
class AccelerateTraining(Training):
    _seen: dict[int, psutil.Process] = field(default_factory=dict)

    def _send(self, process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
        # torch's launcher starts each worker in a new session: a signal to the launcher's process group misses them.
        try:
            launcher = psutil.Process(process.pid)
            for each in [launcher, *launcher.children(recursive=True)]:
                self._seen.setdefault(each.pid, each)
        except psutil.NoSuchProcess:
            pass
        for each in self._seen.values():
            try:
                each.send_signal(signum)  # psutil checks that the pid still belongs to the same process
            except psutil.NoSuchProcess:
                pass

    def _last_row(self) -> dict[str, str]:
        log = self.folder / "log.csv"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        complete = [line for line in lines if line.endswith("\n")]
        return dict(zip(("epoch", "step", "loss"), complete[-1].strip().split(","), strict=True)) if complete else {}


def run_demo(args: argparse.Namespace, folder: Path, env: dict[str, str]) -> list[str]:
    """Run both trainings and print the results; returns the failed checks."""
    env = env | {"TMPDIR": str(folder)}  # a killed launcher cannot remove its temporary files

    def training(title: str, name: str) -> AccelerateTraining:
        command = [*COMMAND, f"--folder={folder / name}", f"--epochs={args.epochs}", f"--seed={args.seed}"]
        return AccelerateTraining(title, folder / name, command, env, args.epochs)

    whole = training("uninterrupted", "whole").run()
    killed = training("to be killed", "killed")
    saved_steps, resumed = killed.run_kill_and_resume(whole["global_step"] // args.epochs)

    weights = (torch.load(folder / name / "weights.pt", weights_only=True) for name in ("whole", "killed"))
    differ = different_tensors(*weights)
    stats = whole["stats"]
    console.print(
        f"powerSGD sent {stats['compression_rate']:.1f} times less, in {stats['compressed_steps']} compressed steps of "
        f"{stats['backward_passes']}; test accuracy {whole['test_accuracy']:.2%}.\n"
        f"It trained the last {resumed['stats']['backward_passes']} of {resumed['global_step']} steps. Final weights "
        f"bit-equal to those of the uninterrupted run: {'NO' if differ else 'yes'}"
    )
    return failures(whole, resumed, saved_steps, differ)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: list[str] | None = None) -> int:
    return run_to_a_verdict(arguments(), argv, run_demo, "compressed steps, exact resume")


if __name__ == "__main__":
    sys.exit(main())
