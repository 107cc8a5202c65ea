"""Runs the tests that need a GPU, and prints a Markdown table of them.

    python3 tests/cuda/run.py [PYTEST ARGUMENTS]        # make test-cuda ARGS="-k sanitizer"

Needs the torch and the pytest of this Python, and nothing else: nothing is installed, no plugin of
pytest is used. One GPU is enough. Fails if there is no device, if every test is skipped, and if a
test hangs.
"""

import contextlib
import faulthandler
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TEST_LIMIT_S = 600  # the slowest starts three processes of 180 s at most


@dataclass(eq=False)  # pytest hashes its plugins
class Results:
    """What became of each test: a plugin of pytest."""

    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    """pytest itself failed, or a file of tests could not be imported."""

    def pytest_runtest_protocol(self, item: Any) -> None:
        faulthandler.dump_traceback_later(TEST_LIMIT_S, exit=True, file=_stderr)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("tests/cuda/")[2] or report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        # of setup, call and teardown, which report one by one
        worst = (
            "failed",
            "skipped",
            "passed",
        )
        self.outcomes[name] = min(
            self.outcomes.get(name, "passed"), report.outcome, key=worst.index
        )
        if report.skipped:
            self.reasons[name] = str(
                report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            )

    def pytest_collectreport(self, report: Any) -> None:
        self.broken |= report.failed

    def count(self, outcome: str) -> int:
        return list(self.outcomes.values()).count(outcome)

    def table(self) -> str:
        lines = ["| test | result | s |", "|---|---|---|"]
        for name, outcome in self.outcomes.items():
            reason = (
                f": {self.reasons[name].removeprefix('Skipped: ')}" if name in self.reasons else ""
            )
            lines.append(
                f"| `{name.replace('|', '/')}` | {outcome}{reason} | {self.seconds[name]:.1f} |"
            )
        return "\n".join(lines)

    def verdict(self) -> str:
        """Why the run as a whole has failed, in one sentence; empty if it has not."""
        if self.broken:
            return "pytest could not run all of the tests: see above."
        if self.count("failed"):
            return f"{self.count('failed')} of {len(self.outcomes)} tests failed: see above."
        if not self.count("passed"):
            return f"No test has run: {len(self.outcomes)} were chosen, and all of them skipped."
        return ""


_stderr = sys.stderr
"""A copy of the real one: pytest redirects file descriptor 2 while a test runs."""


def missing() -> str:
    """What keeps the tests from running, in one sentence; empty if nothing does."""
    for name in ("torch", "pytest"):
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # blocked by whoever started this
            spec = None
        if spec is None:
            return (
                f"{sys.executable} has no {name}: the tests for CUDA need torch and pytest. Install"
                " it there, or name another Python with 'make test-cuda PYTHON=/path/to/python3'."
            )
    from common import no_device

    return no_device()


def run_tests(arguments: list[str]) -> Results:
    """Run pytest in this process with the settings of pyproject.toml that need no plugin."""
    import pytest

    results = Results()
    options = [
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-W",
        "ignore::pytest.PytestConfigWarning",
        "-rfE",
    ]
    with _environment():
        ended = pytest.main(
            [*options, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *arguments],
            [results],
        )
    results.broken |= ended not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    return results


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= {
        "COMMHOOKS_TEST_CUDA": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(arguments: list[str]) -> int:
    global _stderr
    # for `common`; at the end, because other names there are taken
    sys.path.append(str(ROOT / "benchmarks"))
    if problem := missing():
        print(problem, file=sys.stderr)
        return 1
    from common import in_words, machine

    at = machine()
    began = time.monotonic()
    _stderr = os.fdopen(os.dup(2), "w")
    os.chdir(ROOT)
    results = run_tests(["-m", "cuda", "tests/cuda", *arguments])
    counts = ", ".join(
        f"{results.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")
    )
    print(f"\n{results.table()}\n\n{counts} in {time.monotonic() - began:.0f} s. {in_words(at)}")
    if problem := results.verdict():
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
