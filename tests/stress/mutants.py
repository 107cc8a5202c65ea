"""Seeded faults (`seeded_faults/`): each is put into a copy of the packages, and the test named beside it, which passes
without it, must fail there.

    python -m tests.stress.mutants [NAME ...]          # all of them, or those whose name contains one of the words
    python -m tests.stress.mutants --cuda [NAME ...]   # those that need a GPU

A test that passes on a broken program guards nothing. Run by `make test-mutants`; takes some minutes.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.stress.seeded_faults import MUTANTS
from tests.stress.seeded_faults.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "commhooks",
    "lightning_commhooks",
    "accelerate_commhooks",
    "tests",
    "examples",
    "docs",
    "pyproject.toml",
    "constraints-dev.txt",
)
TIME_LIMIT_S = 400


def copy_repository(folder: str) -> None:
    """What the tests of a mutant need, into an empty folder."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)


def run(mutant: Mutant, console: Console) -> str:
    """ "killed", "SURVIVED", or what went wrong."""
    before = run_test(mutant.test, cuda=mutant.cuda)
    if before.outcome != "passed":
        console.print(before.output[-1500:], markup=False)
        return f"NO TEST: without the fault it {before.outcome}"
    after = run_test(mutant.test, mutant, cuda=mutant.cuda)
    if after.outcome != "failed":
        console.print(after.output[-1500:], markup=False)
    return {"passed": "SURVIVED", "failed": "killed"}.get(after.outcome, after.outcome)


@dataclass(frozen=True)
class Outcome:
    outcome: str
    output: str = ""


@functools.cache  # without a fault, a test is run once for all the mutants that name it
def run_test(test: str, mutant: Mutant | None = None, *, cuda: bool = False) -> Outcome:
    """ "passed", "failed" or what went wrong, in a copy of the packages with the fault of `mutant`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_repository(folder)
        if mutant is not None:
            file = Path(folder, mutant.file)
            text = file.read_text()
            if text.count(mutant.old) != 1:
                return Outcome(f"STALE: the text to replace occurs {text.count(mutant.old)} times")
            file.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        if cuda:
            environment["COMMHOOKS_TEST_CUDA"] = "1"
            command += ["-m", "cuda", "-o", "addopts="]  # without the plugins of pytest that these ask for
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return Outcome("TIMED OUT")
    # pytest: 0 all passed, 1 some failed; anything else means that the test did not run at all.
    outcome = {0: "passed", 1: "failed"}.get(done.returncode, f"NOT RUN (pytest exit {done.returncode})")
    if outcome == "passed" and " passed" not in done.stdout:
        outcome = "skipped every test"
    return Outcome(outcome, done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--cuda", action="store_true", help="those that need a GPU, and only these")
    arguments = parser.parse_args()
    words, ours = arguments.names, [mutant for mutant in MUTANTS if mutant.cuda == arguments.cuda]
    chosen = [mutant for mutant in ours if not words or any(word in mutant.name for word in words)]
    console = Console()
    table = Table("mutant", "test that must fail", "outcome", "s")
    failures = 0
    for number, mutant in enumerate(chosen, 1):
        started = time.monotonic()
        outcome = run(mutant, console)
        console.print(f"{number}/{len(chosen)} {outcome}: {mutant.name}", markup=False, soft_wrap=True)
        failures += outcome != "killed"
        table.add_row(mutant.name, mutant.test, outcome, f"{time.monotonic() - started:.0f}")
    console.print(table)
    console.print(f"{len(chosen) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
