"""What `make test-cuda` prints, and when it fails. Without a GPU: test_make.py."""

import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.repository import REPOSITORY, TESTS


def _run(lines: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """A program that has imported the runner as `run`."""
    code = (
        f"import sys; sys.path[:0] = [{str(TESTS / 'cuda')!r}, {str(REPOSITORY / 'benchmarks')!r}];"
        f" import run\n{lines}"
    )
    return subprocess.run(
        [warm.python(), "-c", code], cwd=cwd, capture_output=True, text=True, timeout=280
    )


FILES = {
    "passed": "def test_it(): pass",
    "failed": "def test_it(): assert False",
    "skipped": "import pytest\ndef test_it(): pytest.skip('not here')",
    "no import": "import nothing_of_that_name",
    "no test": "",
}


@pytest.mark.parametrize(
    ("names", "verdict", "row"),
    [
        (["passed", "skipped"], "", "`test_0.py::test_it` | passed |"),
        (
            ["passed", "failed"],
            "1 of 2 tests failed: see above.",
            "`test_1.py::test_it` | failed |",
        ),
        (
            ["skipped"],
            "No test has run: 1 were chosen, and all of them skipped.",
            "`test_0.py::test_it` | skipped: not here |",
        ),
        (["passed", "no import"], "pytest could not run all of the tests: see above.", ""),
        (["no test"], "No test has run: 0 were chosen, and all of them skipped.", ""),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, list) else None,
)
def test_its_table_and_its_verdict_are_right(
    tmp_path: Path, names: list[str], verdict: str, row: str
) -> None:
    for number, name in enumerate(names):
        (tmp_path / f"test_{number}.py").write_text(FILES[name] + "\n")
    done = _run(
        f"run.ROOT = run.Path({str(tmp_path)!r}); (run.ROOT /"
        " 'pyproject.toml').write_text('')\nresults = run.run_tests([str(run.ROOT)]);"
        " print(results.table()); print('verdict:', results.verdict())"
    )
    assert f"verdict: {verdict}\n" in done.stdout, done.stdout + done.stderr
    assert row in done.stdout


def test_all_that_needs_a_gpu_is_where_make_looks_for_it() -> None:
    """`make test-cuda` collects one folder: others import what such a machine may lack."""
    elsewhere = [
        path.relative_to(TESTS)
        for path in TESTS.rglob("test_*.py")
        if path.parent != TESTS / "cuda"
        and "mark.cuda" in path.read_text()
        and path != Path(__file__)
    ]
    assert elsewhere == []
