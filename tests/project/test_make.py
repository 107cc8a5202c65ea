"""The Makefile where Python is not what it needs, and what it installs for whom; and the seeded faults and the areas of
mutants, which must fit the code that they break."""

import ast
import re
import sys

from tests.stress import mutants, mutation_areas
from tests.support.repository import REPOSITORY, make


def test_a_python_without_ensurepip_is_one_sentence(tmp_path):
    python = tmp_path / "python-without-ensurepip"
    code = "import sys; sys.modules['ensurepip'] = None; exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 97\nexec "{sys.executable}" -c "{code}" "$2"\n')
    python.chmod(0o755)
    venv = tmp_path / "venv"
    done = make("venv", f"PYTHON={python}", f"VENV={venv}")
    assert done.returncode != 0 and not venv.exists()
    sentence, *rest = done.stderr.splitlines()
    assert sentence.startswith(f"'{python}' cannot create virtual environments: install its venv package")
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


def test_the_demo_imports_what_it_installs():
    imported = set()
    for name in ("clean_env", "demo", "digits", "lightning_digits"):
        for node in ast.walk(ast.parse((REPOSITORY / "examples" / f"{name}.py").read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.partition(".")[0] for name in names}
    ours = {"clean_env", "digits", "lightning_commhooks"}
    assert imported - ours - sys.stdlib_module_names == {"torch", "lightning", "sklearn", "rich"}


def test_the_seeded_faults_fit_the_code():
    assert [mutant.name for mutant in mutants.MUTANTS if not _fits(mutant)] == []


def _fits(mutant: mutants.Mutant) -> bool:
    text = (REPOSITORY / mutant.file).read_text()
    if text.count(mutant.old) != 1 or mutant.old == mutant.new:
        return False
    if mutant.file.endswith(".py"):
        ast.parse(text.replace(mutant.old, mutant.new))  # what is no Python fails every test
    file, _, name = mutant.test.partition("::")
    function = f"def {name.partition('[')[0]}(" if name else "def test_"
    return function in (REPOSITORY / "tests" / file).read_text()


def test_the_areas_of_the_mutants_fit_the_code():
    parts = [part for area in mutation_areas.AREAS.values() for part in area]
    folders = ("engine", "checkpoint", "compressors/quantized", "compressors/powersgd")
    modules = {path for folder in folders for path in (REPOSITORY / "commhooks" / folder).glob("[a-z]*.py")}
    files = [file for part in parts for file in part.files]
    assert len(files) == len(set(files)) and {REPOSITORY / file for file in files} == modules
    for part in parts:
        for file, _, name in (test.partition("::") for test in part.tests):
            assert not name or f"def {name}(" in (REPOSITORY / file).read_text(), f"{file}::{name}"
            assert (REPOSITORY / file).exists()
    for file, old, _ in mutation_areas.EXPLAINED:
        assert old in (line.strip() for line in (REPOSITORY / file).read_text().splitlines()), (file, old)
    for file, function in mutation_areas.EXPLAINED_NUMBERS:
        assert f"def {function}(" in (REPOSITORY / file).read_text(), (file, function)
