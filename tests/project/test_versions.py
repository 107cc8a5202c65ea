"""docs/versions.md, pyproject.toml, the plugins and `make test-versions` name the same versions."""

import importlib.metadata
import os
import re
import subprocess
from types import ModuleType

import pytest
import torch

from commhooks.errors import OLDEST, check_version
from tests.support import features, warm
from tests.support.repository import REPOSITORY
from tests.versions import run_versions as run
from tests.versions import version_sets as sets

DOCS = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
BOUNDS = re.findall(
    r'"(torchft|torch|omegaconf|lightning|accelerate|transformers)>=([\d.]+)', PYPROJECT
)
IN_THE_TABLE = ("torch", "lightning", "accelerate", "transformers")


def test_the_bounds_are_the_oldest_versions_that_were_run():
    oldest = sets.SETS[sets.OLDEST]
    assert {package for package, _ in BOUNDS} == {
        "torch",
        "omegaconf",
        "lightning",
        "accelerate",
        "transformers",
        "torchft",
    }
    assert all(version == oldest[package] for package, version in BOUNDS)
    assert {
        package.replace("_", "-"): version for package, version in OLDEST.items()
    }.items() <= oldest.items()
    reasons = dict(
        re.findall(
            r"^\| (\w+)[^|]* \| ([\d.]+) \|", DOCS.partition("## Why not older")[2], re.MULTILINE
        )
    )
    assert {package.lower(): version for package, version in reasons.items()} == dict(BOUNDS)


def test_the_table_has_every_set():
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| 20", DOCS, re.MULTILINE)
    pinned = sets.pinned()
    assert set(rows) == {
        tuple(versions[package] for package in IN_THE_TABLE) for versions in sets.SETS.values()
    }
    newest = sets.SETS[sets.NEWEST]
    assert all(newest[package] == pinned[package] for package in IN_THE_TABLE[1:])
    assert run.HEAD in DOCS


def test_a_set_replaces_the_pinned_versions():
    lines = sets.constraints(sets.OLDEST).splitlines()
    assert "torch==2.8.0" in lines and "pytest==" + sets.pinned()["pytest"] in lines
    names = [line.partition("==")[0] for line in lines if "==" in line]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", sorted(OLDEST))
def test_an_older_framework_is_told_which_one_to_install(name):
    framework = ModuleType(name)
    for framework.__version__ in (OLDEST[name], f"{OLDEST[name]}rc1+local", "100.0"):
        check_version(framework)
    for framework.__version__ in ("0.9", "1.9.9.post1"):
        with pytest.raises(
            ImportError,
            match=rf"commhooks needs {name} {OLDEST[name]} or newer, and {framework.__version__}",
        ):
            check_version(framework)


def test_an_old_framework_of_others_is_left_alone(tmp_path):
    """Only who asks for our classes for it is told."""
    old = tmp_path / "pytorch_lightning"
    old.mkdir()
    (old / "__init__.py").write_text('__version__ = "2.5.0"\nCallback = object\n')
    names = ("DDPStrategy", "ModelParallelStrategy", "StrategyRegistry")
    (old / "strategies.py").write_text("".join(f"{name} = object\n" for name in names))
    script = tmp_path / "script.py"
    script.write_text(
        "import lightning_commhooks, pytorch_lightning\n"
        "try:\n    import lightning_commhooks.pytorch_lightning\n"
        "except ImportError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{sets.ROOT}"}
    done = subprocess.run(
        [warm.python(), script], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.stdout.startswith("commhooks needs pytorch_lightning 2.6.0 or newer, and 2.5.0"), (
        done.stderr
    )


def test_the_report_of_pytest_is_counted(tmp_path):
    report = tmp_path / "results.xml"
    cases = "<failure/>", "<error/>", "<failure/><error/>", "<skipped/>", "", "<system-out/>"
    elements = "".join(f"<testcase>{case}</testcase>" for case in cases)
    report.write_text(f"<testsuites><testsuite>{elements}</testsuite></testsuites>")
    assert run.counts(report) == run.Counts(passed=2, skipped=1, failed=3)
    assert run.row("2.8", "all", run.counts(report)).startswith(
        "| 2.8.0 | 2.6.0 | 1.10.0 | 5.3.0 | 20"
    )


def test_the_pinned_versions_lack_nothing():
    """Else `make test` would leave out what only other versions lack."""
    pinned = sets.pinned()
    here = {
        package: importlib.metadata.version(package).partition("+")[0]
        for package in (*IN_THE_TABLE, "omegaconf")
    }
    if here != {package: pinned[package] for package in here} or torch.version.cuda is not None:
        pytest.skip("these are not the pinned versions")
    marks = [mark for mark in vars(features).values() if isinstance(mark, pytest.MarkDecorator)]
    assert marks and [mark.kwargs["reason"] for mark in marks if mark.args[0]] == []


def test_an_unknown_set_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["2.8", "1.0"])
    assert (
        "1.0 is none of the sets of tests/versions/version_sets.py: 2.8, 2.11, 2.15"
        in capsys.readouterr().err
    )
