"""The documentation as a site: what `make docs` builds, and which pages it has."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import PACKAGES, REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


NAV = tomllib.loads((REPOSITORY / "zensical.toml").read_text())["project"]["nav"]


def _pages_of_nav(entry=NAV) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [leaf for child in children for leaf in _pages_of_nav(child)]


def test_the_nav_names_every_page_once():
    assert sorted(_pages_of_nav()) == sorted(path.name for path in (REPOSITORY / "docs").glob("*.md"))


def _build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


def test_the_site(tmp_path):
    """As `make docs`, in a copy. What leads nowhere is an error."""
    for module in ("zensical", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason='the site needs Python 3.11 and pip install ".[docs]"')
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    shutil.copy(REPOSITORY / "zensical.toml", tmp_path)
    for package in PACKAGES:
        (tmp_path / package).symlink_to(REPOSITORY / package)
    done = _build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    formulas = (tmp_path / "site" / "algorithm" / "index.html").read_text()
    assert formulas.count('class="arithmatex"') > 20 and "$$" not in formulas
    assert 'id="commhooks.attach"' in (tmp_path / "site" / "reference" / "index.html").read_text()
    # What assets/diff.js needs to copy the new version of a diff: the class, and a span per line.
    migrating = (tmp_path / "site" / "migrating" / "index.html").read_text()
    assert re.search(r'class="language-diff .*<code><span id="__span-', migrating) and "assets/diff.js" in migrating
    page = tmp_path / "docs" / "index.md"
    text = page.read_text()
    page.write_text(f"{text}\n[x](nothing.md) [x](choosing.md#nothing) [x][commhooks.nothing]\n")
    done = _build(tmp_path)
    assert done.returncode != 0 and "3 issues found" in done.stdout + done.stderr, done.stdout + done.stderr
