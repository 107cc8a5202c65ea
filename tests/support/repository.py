"""Paths for tests that start scripts or read files of the repository."""

import ast
import functools
import os
import subprocess
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
REPOSITORY = TESTS.parent
PYTHONPATH = str(REPOSITORY)
"""For processes that import this copy's packages and `tests`."""
PACKAGES = ("commhooks", "lightning_commhooks", "accelerate_commhooks")


def sources() -> dict[str, str]:
    """Return the text of each Python file of the packages, by its path in the repository."""
    files = [file for package in PACKAGES for file in sorted((REPOSITORY / package).rglob("*.py"))]
    return {
        file.relative_to(REPOSITORY).as_posix(): file.read_text(encoding="utf-8") for file in files
    }


@functools.cache
def nodes() -> dict[str, list[ast.AST]]:
    """Return all nodes of the syntax tree of each of these files."""
    return {file: list(ast.walk(ast.parse(text))) for file, text in sources().items()}


def make(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run make, independently of a make that runs these tests and passes on its ARGS."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "ARGS"))
    }
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=env | environ, capture_output=True, text=True, timeout=280
    )
