"""The comparison of two versions uses the packages on the path and its own `tests`, and sees a
changed factor.
"""

import os
import shutil
import subprocess
from pathlib import Path

from tests.support import warm
from tests.support.repository import REPOSITORY

SCRIPT = REPOSITORY / "tests" / "stress" / "compare_versions.py"
CASE = "1 ranks: int8, torch, one bucket"


def _run(folder: Path, version: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(version)}
    command = [warm.python(), str(SCRIPT), *arguments]
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)


def test_it_finds_a_changed_factor_in_the_version_on_the_path(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(
        REPOSITORY / "commhooks", other / "commhooks", ignore=shutil.ignore_patterns("__pycache__")
    )
    (other / "tests").mkdir()
    (other / "tests" / "__init__.py").write_text(
        "raise ImportError('the tests of the other version')"
    )
    blocks = other / "commhooks" / "compressors" / "quantized" / "mean.py"
    text = blocks.read_text()
    # Of another length: bytecode of the same second and size would count as that of this source.
    changed = text.replace("return 127 if", "return 99 if")
    assert changed != text
    for output, code in (("one", text), ("changed", changed)):
        blocks.write_text(code)
        done = _run(tmp_path, other, "record", "--only", CASE, "--output", output)
        assert "1 cases (0 of them failed)" in done.stdout and str(other) in done.stdout, (
            done.stdout + done.stderr
        )
    assert "1 cases equal, 0 differ" in _run(tmp_path, other, "compare", "one", "one").stdout
    differing = _run(tmp_path, other, "compare", "one", "changed")
    assert differing.returncode == 1 and "numbers differ, by up to" in differing.stdout
