"""Runs the tests with each set of `version_sets.py`, and prints a Markdown table.

    # make test-versions VERSIONS="2.8 2.15" ARGS=...
    python3 -m tests.versions.run_versions 2.8 2.15 -- tests/comm -x

The environments stay in .venvs/ for the next time. torch from PyPI brings the libraries of CUDA:
count on 8 GB each, though nothing runs on a GPU.
"""

import argparse
import datetime
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.versions import version_sets as sets

ENVIRONMENTS = sets.ROOT / ".venvs"
PYTEST = ("-p", "no:cacheprovider", "-q", "-rfE", "-n", "2", "--dist", "loadfile")


@dataclass(frozen=True)
class Counts:
    passed: int
    skipped: int
    failed: int


def environment(name: str) -> Path:
    """Return the folder of the set's environment; install it if it is missing or out of date."""
    folder = ENVIRONMENTS / f"torch-{name}"
    wanted = (
        f"{sets.constraints(name)}# {sys.version}\n{(sets.ROOT / 'pyproject.toml').read_text()}"
    )
    stamp, constraints = folder / "ready", folder / "constraints.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    print(f"Setting up {folder}: this downloads some gigabytes.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints.write_text(sets.constraints(name))
    install = [
        folder / "bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        constraints,
    ]
    subprocess.run([*install, "--editable", ".[dev]"], cwd=sets.ROOT, check=True)
    stamp.write_text(wanted)
    return folder


def run(name: str, arguments: list[str]) -> Counts:
    """Run pytest in the environment of the set `name`.

    Raises:
        SystemExit: pytest ended with another status than 0 and 1, or without a report.
    """
    folder = environment(name)
    report = folder / "results.xml"
    report.unlink(missing_ok=True)
    pytest = [
        folder / "bin/python",
        "examples/clean_env.py",
        "-m",
        "pytest",
        *PYTEST,
        f"--junit-xml={report}",
    ]
    status = subprocess.run([*pytest, *arguments], cwd=sets.ROOT).returncode
    if status not in (0, 1) or not report.is_file():
        raise SystemExit(
            f"the tests of the set {name} could not be run: pytest ended with status {status}"
        )
    return counts(report)


def counts(report: Path) -> Counts:
    """Count the outcomes in a JUnit report of pytest; a test with errors counts as failed."""
    passed = skipped = failed = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        failed += bool(kinds & {"failure", "error"})
        skipped += "skipped" in kinds
        passed += not kinds & {"failure", "error", "skipped"}
    return Counts(passed, skipped, failed)


def row(name: str, what: str, counts: Counts) -> str:
    """Return one line of the table in docs/versions.md."""
    versions = [
        sets.SETS[name][package] for package in ("torch", "lightning", "accelerate", "transformers")
    ]
    today = datetime.date.today().isoformat()
    cells = [*versions, today, what, str(counts.passed), str(counts.skipped), str(counts.failed)]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| torch | Lightning | Accelerate | transformers | date | tests | passed | skipped | failed |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="VERSION", help=f"{', '.join(sets.SETS)}; default: all of them"
    )
    parser.usage = "%(prog)s [-h] [VERSION ...] [-- PYTEST ARGUMENTS]"
    end = argv.index("--") if "--" in argv else len(argv)
    names = parser.parse_args(argv[:end]).names
    arguments = argv[end + 1 :]
    if unknown := [name for name in names if name not in sets.SETS]:
        parser.error(
            f"{unknown[0]} is none of the sets of tests/versions/version_sets.py:"
            f" {', '.join(sets.SETS)}"
        )
    rows = [HEAD]
    failed = 0
    try:
        for name in names or sets.SETS:
            counts = run(name, arguments)
            rows.append(row(name, shlex.join(arguments) or "all", counts))
            failed += counts.failed
    finally:
        print("\n" + "\n".join(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
