"""The layers of docs/architecture.md hold, and the tool that checks them fails on a wrong import."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import PACKAGES, REPOSITORY

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--no-logo", "--no-cache"]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, timeout=280
    )


def test_the_layers_hold(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "wrong", "contract"),
    [
        ("commhooks/comm/wire.py", "from commhooks.engine import session", "imports go down only"),
        ("commhooks/compressors/unit_plan.py", "from commhooks.compressors import registry", "no circles"),
        (
            "lightning_commhooks/monitor.py",
            "from commhooks.engine.session import Session",
            "plugins use the public names",
        ),
        ("commhooks/hook/model_plan.py", "import lightning", "the core knows no framework"),
    ],
)
def test_a_wrong_import_is_found(copy: Path, file: str, wrong: str, contract: str) -> None:
    path = copy / file
    text = path.read_text()
    path.write_text(f"{text}\n\ndef _wrong():\n    {wrong}\n")
    try:
        done = lint(copy)
    finally:
        path.write_text(text)
    broken = [line for line in done.stdout.splitlines() if "BROKEN" in line]
    assert done.returncode == 1 and any(contract in line for line in broken), done.stdout + done.stderr


def test_the_top_of_the_package_has_few_entries() -> None:
    entries = [path.name for path in (REPOSITORY / "commhooks").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 13, entries
