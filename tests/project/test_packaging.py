"""What a user gets from `pip install commhooks`: the wheel, installed alone, imported from where it was installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from repository import REPOSITORY

PACKAGES = ("commhooks", "lightning_commhooks", "accelerate_commhooks")

# Put before a snippet: makes the frameworks unimportable, as if they were not installed.
BLOCK_FRAMEWORKS = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
"""


def _run(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environ
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: no old `build` folder gets into the wheel, no new one into the repository."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    done = _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."], cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the wheel's content; what it depends on comes from the running environment."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    done = _run(command, cwd=site)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


def _python(site: Path, code: str) -> Any:
    """What `code`, which prints JSON, finds outside of the repository with the installed wheel before everything."""
    done = _run([sys.executable, "-c", textwrap.dedent(code)], cwd=site.parent, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def imported(installed: Path) -> list[Any]:
    """What a bare `import commhooks` is and imports."""
    return _python(
        installed,
        """
        import commhooks, json, sys
        print(json.dumps([commhooks.__version__, commhooks.__file__, sorted(sys.modules)]))
        """,
    )


@pytest.fixture(scope="module")
def without_frameworks(installed: Path) -> dict[str, str | None]:
    """Imports, one after another, where no framework is installed: None, or the error."""
    return _python(
        installed,
        BLOCK_FRAMEWORKS
        + """
import importlib, json
found = {}
for name in ("commhooks", "commhooks.tools.cli", "lightning_commhooks", "accelerate_commhooks"):
    try:
        found[name] = importlib.import_module(name) and None
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
""",
    )


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.partition("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    in_repository = {
        path.relative_to(REPOSITORY).as_posix() for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == in_repository
    sources = {path for ending in ("c", "h") for path in (REPOSITORY / "commhooks").rglob(f"*.{ending}")}
    assert {path.parent.parent.name for path in sources} == {"compressors", "powersgd", "quantized"}
    assert {path.relative_to(REPOSITORY).as_posix() for path in sources} <= set(names)  # compiled where they are used


def test_wheel_metadata(wheel, imported):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "commhooks"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    for_users, for_us = {"lightning", "accelerate", "transformers", "cli", "plot"}, {"dev", "bench", "docs"}
    assert for_users <= set(metadata.get_all("Provides-Extra")) <= for_users | for_us
    unconditional = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert unconditional == {"torch>=2.13.0", "omegaconf>=2.3.0", "rich"}
    assert imported[0] == metadata["Version"]


def test_installed_wheel_is_what_gets_imported(installed, imported):
    assert imported[1] == str(installed / "commhooks" / "__init__.py")


@pytest.mark.parametrize("command", ["commhooks", "accelerate-commhooks"])
def test_installed_command(installed, command):
    done = _run([str(installed / "bin" / command), "--help"], cwd=installed.parent, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert f"usage: {command} " in done.stdout.lower()


def test_core_imports_without_the_frameworks(without_frameworks):
    assert [without_frameworks[name] for name in ("commhooks", "commhooks.tools.cli")] == [None, None]


@pytest.mark.parametrize(
    ("plugin", "sentence"),
    [
        ("lightning_commhooks", 'lightning_commhooks needs Lightning: pip install "commhooks[lightning]"'),
        ("accelerate_commhooks", 'accelerate_commhooks needs Accelerate: pip install "commhooks[accelerate]"'),
    ],
)
def test_plugin_without_its_framework_says_what_to_install(without_frameworks, plugin, sentence):
    """Proves too that the test above can fail: under the same blocker an import that needs a framework does."""
    assert without_frameworks[plugin] == f"ImportError: {sentence}"


def test_core_import_is_light(imported):
    """The configuration and the tables are for those who use them: a bare import pays for neither."""
    heavy = {"omegaconf", "rich", "lightning", "pytorch_lightning", "accelerate", "transformers", "jsonargparse"}
    assert sorted(heavy & set(imported[2])) == []
