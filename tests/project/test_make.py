"""The Makefile where Python is not what it needs; and the seeded faults, which must fit the code that they break."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import mutants
import pytest
from repository import REPOSITORY


def test_a_python_without_ensurepip_is_one_sentence(tmp_path):
    python = tmp_path / "python-without-ensurepip"
    code = "import sys; sys.modules['ensurepip'] = None; exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 97\nexec "{sys.executable}" -c "{code}" "$2"\n')
    python.chmod(0o755)
    venv = tmp_path / "venv"
    command = ["make", "venv", f"PYTHON={python}", f"VENV={venv}"]
    # Not as a part of the make that may be running these tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode != 0 and not venv.exists()
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith(f"'{python}' cannot create virtual environments: install its venv package")
    assert all(line.startswith("make: ***") for line in rest) and "Setting up" not in done.stdout


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seeded_fault_fits_the_code(mutant):
    text = (REPOSITORY / mutant.file).read_text()
    assert text.count(mutant.old) == 1 and mutant.old != mutant.new
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))  # what is no Python fails every test
    file, _, name = mutant.test.partition("::")
    function = f"def {name.partition('[')[0]}(" if name else "def test_"
    assert function in (REPOSITORY / "tests" / file).read_text()
