"""Take each wait of the packages for an accelerator out in turn; a test on the simulated accelerator must notice.

    python -m tests.stress.waits [PART OF A PLACE ...]

A mutant is a copy of the repository without one statement of `WAITS`. What no test notices is printed, and makes the
exit status 1. `make test-mutants AREAS=waits` does the same. Prints the table for CONTRIBUTING.md.
"""

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.stress.mutation import enter_copy, warm_pytest
from tests.support.repository import REPOSITORY, sources

WAITS = re.compile(
    r"(wait_stream|wait_event|record_stream|record|keep_for_current_stream|wait_for_codec|_?mark\.\w+)\("
)
TESTS = "tests/engine/test_simulated_accelerator.py tests/engine/test_streams.py tests/engine/test_immediate.py"
LIMIT_S = 600


def places() -> Iterator[tuple[str, ast.stmt]]:
    """The file and the statement of each wait."""
    for file, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = ast.unparse(node.value.func)
                if WAITS.fullmatch(f"{called.rpartition('.')[2]}(") or WAITS.search(f"{called}("):
                    yield file, node


def without(text: str, node: ast.stmt) -> str:
    """The source without this statement."""
    lines = text.splitlines(keepends=True)
    assert node.end_lineno is not None
    lines[node.lineno - 1 : node.end_lineno] = [f"{' ' * node.col_offset}pass\n"]
    return "".join(lines)


def main(wanted: list[str]) -> int:
    survived = 0
    with tempfile.TemporaryDirectory(prefix="waits-") as folder:
        enter_copy(folder)
        pytest = f"{warm_pytest()} {TESTS}"
        print("| place | statement | found by |\n|---|---|---|")
        for file, node in places():
            text, statement = Path(file).read_text(encoding="utf-8"), ast.unparse(node)
            place = f"{file.removeprefix('commhooks/')}:{node.lineno}"
            if wanted and not any(each in place for each in wanted):
                continue
            Path(file).write_text(without(text, node), encoding="utf-8")
            done = subprocess.run(pytest, shell=True, capture_output=True, text=True, timeout=LIMIT_S)
            Path(file).write_text(text, encoding="utf-8")
            found = re.search(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)
            why = re.search(r"nothing orders them|is freed while", done.stdout)
            survived += done.returncode == 0
            layer = {"nothing orders them": "clocks", "is freed while": "allocator", None: "assertion"}[why and why[0]]
            by = "**SURVIVED**" if done.returncode == 0 else f"{layer}: `{found[1] if found else done.stdout[-300:]}`"
            print(f"| `{place}` | `{statement}` | {by} |", flush=True)
        import os

        os.chdir(REPOSITORY)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
