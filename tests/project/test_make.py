"""The Makefile where Python or the device is not what it needs, and what it installs for whom."""

import ast
import re
import sys

import pytest

from tests.support import warm
from tests.support.repository import REPOSITORY, make


def test_a_python_without_ensurepip_is_one_sentence(tmp_path):
    python = tmp_path / "python-without-ensurepip"
    code = "import sys; sys.modules['ensurepip'] = None; exec(sys.argv[1])"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] || exit 97\nexec "{sys.executable}" -c "{code}" "$2"\n'
    )
    python.chmod(0o755)
    venv = tmp_path / "venv"
    done = make("venv", f"PYTHON={python}", f"VENV={venv}")
    assert done.returncode != 0 and not venv.exists()
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith(
        f"'{python}' cannot create virtual environments: install its venv package"
    )
    assert all(line.startswith("make: ***") for line in rest) and "Setting up" not in done.stdout


def test_the_demo_installs_only_what_it_needs_and_nothing_twice(tmp_path):
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho it runs: $@\n")
    python.chmod(0o755)

    def installed(target: str) -> list[str]:
        done = make(target, f"PYTHON={sys.executable}", f"VENV={venv}")
        assert done.returncode == 0, done.stderr
        return re.findall(r"it runs: -m pip install .*--editable (\S+)", done.stdout)

    assert installed("demo") == [".[demo]"] and installed("demo") == []
    assert installed("test") == [".[dev]"] and installed("test") == installed("demo") == []
    for stamp in venv.glob(".ready*"):
        stamp.unlink()
    assert installed("test") == [".[demo]", ".[dev]"] and installed("demo") == []


@pytest.mark.parametrize("target", ["test-cuda", "bench-gpu"])
def test_without_a_device_it_fails_with_a_sentence(target):
    done = make(target, f"PYTHON={warm.python()}", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0 and "|" not in done.stdout
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith(("This torch (", "torch ")) and "CUDA" in sentence
    assert all(line.startswith("make: ***") for line in rest)


def test_the_demo_imports_what_it_installs():
    imported = set()
    for name in ("clean_env", "demo", "digits", "lightning_digits", "slow_link"):
        for node in ast.walk(ast.parse((REPOSITORY / "examples" / f"{name}.py").read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    ours = {"clean_env", "digits", "slow_link", "lightning_commhooks"}
    assert imported - ours - sys.stdlib_module_names == {"torch", "lightning", "sklearn", "rich"}
