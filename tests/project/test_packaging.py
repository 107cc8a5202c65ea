"""Source distribution and wheel hold what they should and work in an environment of their own."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import warm
from tests.support.compilers import HAS_COMPILER
from tests.support.repository import PACKAGES, REPOSITORY, sources

OUTSIDE = Path(__file__).with_name("outside")  # programs of users

# Put before a snippet: makes the frameworks unimportable, as if they were not installed. The
# process that it is forked from may have some.
BLOCK_FRAMEWORKS = """
import sys
FRAMEWORKS = {"lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers"}
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FRAMEWORKS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
for name in [name for name in sys.modules if name.partition(".")[0] in FRAMEWORKS]:
    del sys.modules[name]
"""


def _run(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environ
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both. Built from a copy: no old `build` folder gets into them, no new one
    into the repository.
    """
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(
            REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    # The wheel is built from the unpacked source distribution, so that nothing may be missing
    # there.
    done = _run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."], cwd=source
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. It sees what the running one has installed, but not the
    repository, which is there by a .pth file only: those of a folder that a .pth file names are not
    read.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    done = _run([*pip, "install", "--no-deps", "--no-index", str(wheel)], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (_site_of(folder) / "dependencies.pth").write_text("\n".join(sorted(dependencies)) + "\n")
    return folder


@pytest.fixture(scope="module")
def python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def _printed(python: str, code: str, cwd: Path, **environ: str) -> Any:
    """What `code` prints as JSON."""
    done = _run([python, "-c", textwrap.dedent(code)], cwd, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _site_of(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


@pytest.fixture(scope="module")
def imported(python: str) -> list[Any]:
    """What a bare `import commhooks` is and imports."""
    return _printed(
        python,
        """
        import commhooks, json, sys
        print(json.dumps([commhooks.__version__, commhooks.__file__, sorted(sys.modules)]))
        """,
        Path(python).parent,
    )


@pytest.fixture(scope="module")
def without_frameworks(environment: Path) -> dict[str, str | None]:
    """Imports, one after another, where no framework is installed: None, or the error."""
    return _printed(
        warm.python(),
        BLOCK_FRAMEWORKS
        + """
import importlib, json, sys
found = {}
for name in ("commhooks", "commhooks.tools.cli", "lightning_commhooks", "accelerate_commhooks"):
    try:
        importlib.import_module(name)
        if "_" in name:  # a plugin
            found[name] = getattr(sys.modules[name], sys.modules[name].__all__[0])
        found[name] = None
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
assert sys.modules["commhooks"].__file__.startswith(SITE)
print(json.dumps(found))
""".replace("SITE", repr(str(_site_of(environment)))),
        environment,
        PYTHONPATH=str(_site_of(environment)),
    )


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.partition("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert {name for name in names if name.endswith(".py")} == sources().keys()
    in_c = {
        path for ending in ("c", "h") for path in (REPOSITORY / "commhooks").rglob(f"*.{ending}")
    }
    assert {path.parent.name for path in in_c} == {"native"}
    # compiled where they are used
    assert {path.relative_to(REPOSITORY).as_posix() for path in in_c} <= set(names)


def test_the_wheel_has_its_metadata(wheel, imported):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "commhooks"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    for_users = {"lightning", "accelerate", "transformers", "members", "cli", "completion"}
    for_us = {"dev", "demo", "bench", "docs"}
    assert for_users <= set(metadata.get_all("Provides-Extra")) <= for_users | for_us
    unconditional = {line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert unconditional == {"torch>=2.8.0", "omegaconf>=2.3.0", "rich"}
    assert imported[0] == metadata["Version"]


def test_the_source_distribution_holds_what_it_was_built_from(distributions):
    (path,) = distributions.glob("*.tar.gz")
    top_level = {name.split("/")[1] for name in tarfile.open(path).getnames() if "/" in name}
    made = {"PKG-INFO", "setup.cfg", "commhooks.egg-info"}
    assert top_level - made == {"pyproject.toml", "README.md", "LICENSE", *PACKAGES}


RELEASE = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "release.yml").read_text())["jobs"]


def _step_of_release(start: str, tag: str, cwd: Path) -> int:
    """Run the step of the job `build` whose name starts so, as GitHub does for that tag."""
    (command,) = (
        step["run"] for step in RELEASE["build"]["steps"] if step.get("name", "").startswith(start)
    )
    done = _run(
        ["bash", "-e", "-c", command],
        cwd,
        GITHUB_REF_NAME=tag,
        GITHUB_REPOSITORY="someone/commhooks",
    )
    return done.returncode


def test_a_release_needs_the_tag_of_its_version(imported):
    version = imported[0]
    assert _step_of_release("The tag", f"v{version}", REPOSITORY) == 0
    assert _step_of_release("The tag", f"v{version}.1", REPOSITORY) != 0


def test_the_links_of_a_released_readme_name_their_site(tmp_path):
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    assert _step_of_release("Links", "v1.2.3", tmp_path) == 0
    readme = (tmp_path / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", readme) + re.findall(
        r"^\[[\w-]+\]: (\S+)$", readme, re.MULTILINE
    )
    pages = "https://github.com/someone/commhooks/blob/v1.2.3/"
    figures = "https://raw.githubusercontent.com/someone/commhooks/v1.2.3/docs/figures/"
    assert (
        len(links) > 10 and [link for link in links if not link.startswith((pages, figures))] == []
    )


def test_a_release_is_tested_with_every_front_end():
    front_ends = RELEASE["wheel-test"]["strategy"]["matrix"]["front-end"]
    for program in (REPOSITORY / ".ci" / "wheel_test.py", OUTSIDE / "one_front_end.py"):
        assert list(runpy.run_path(str(program))["FRONT_ENDS"]) == front_ends
    assert RELEASE["publish"]["needs"] == "wheel-test" and RELEASE["wheel-test"]["needs"] == "build"


def test_installed_wheel_is_what_gets_imported(environment, imported):
    assert Path(imported[1]).is_relative_to(environment)


@pytest.mark.parametrize("command", ["commhooks", "accelerate-commhooks"])
def test_the_installed_command_runs(environment, python, imported, command):
    script = environment / "bin" / command
    assert script.read_text().startswith(f"#!{python}\n") and os.access(script, os.X_OK)
    run = f"""
    import runpy, sys
    for flag in ("--help", "--version"):
        sys.argv = [{str(script)!r}, flag]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
    """
    done = _run([python, "-c", textwrap.dedent(run)], cwd=environment)
    assert done.returncode == 0, done.stderr
    assert f"usage: {command} " in done.stdout.lower() and done.stdout.endswith(
        f"\ncommhooks {imported[0]}\n"
    )


def test_two_ranks_train_without_a_warning(environment, tmp_path):
    """Of ours: torch and the frameworks are imported before."""
    command = [warm.python("lightning.pytorch", "accelerate"), str(OUTSIDE / "two_ranks.py")]
    path = {"PYTHONPATH": str(_site_of(environment))}
    other = subprocess.Popen(
        [*command, "1", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, **path},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        done = _run([*command, "0", str(tmp_path)], cwd=tmp_path, **path)
        _, errors = other.communicate(timeout=280)
    finally:
        other.kill()
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + errors
    # torch 2.8's gloo says before that who is connected.
    file, compressed_steps, kernel = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(environment) and compressed_steps == 2
    # native: compiled from the C sources in the wheel
    assert kernel == ("native" if HAS_COMPILER else "torch")


def test_core_imports_without_the_frameworks(without_frameworks):
    assert [without_frameworks[name] for name in ("commhooks", "commhooks.tools.cli")] == [
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("plugin", "sentence"),
    [
        ("lightning_commhooks", "lightning_commhooks needs Lightning: pip install lightning"),
        ("accelerate_commhooks", "accelerate_commhooks needs Accelerate: pip install accelerate"),
    ],
)
def test_plugin_without_its_framework_says_what_to_install(without_frameworks, plugin, sentence):
    """This also proves that the test above can fail: the blocker works."""
    assert without_frameworks[plugin] == f"ImportError: {sentence}"


def test_core_import_is_light(imported):
    """A bare import must not pay for configuration and tables that it does not use."""
    heavy = {
        "torch",
        "omegaconf",
        "rich",
        "lightning",
        "pytorch_lightning",
        "accelerate",
        "transformers",
        "jsonargparse",
    }
    assert sorted(heavy & set(imported[2])) == []
