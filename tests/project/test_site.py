"""The documentation as a site: what `make docs` builds, and which pages it has."""

import re
import shutil
import subprocess
import sys

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
    assert sorted(_pages_of_nav()) == sorted(
        path.name for path in (REPOSITORY / "docs").glob("*.md")
    )


def test_the_repository_has_one_address():
    """And none is invented: pyproject.toml has it first."""
    settings = (
        tomllib.loads((REPOSITORY / file).read_text())["project"]
        for file in ("pyproject.toml", "zensical.toml")
    )
    package, site = settings
    assert package.get("urls", {}).get("Repository") == site.get("repo_url")


def test_the_site_is_built_and_broken_links_are_errors(tmp_path):
    """As `make docs`, in a copy. What leads nowhere is an error: three places that the test adds,
    and no others.
    """
    for module in ("zensical", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason='the site needs Python 3.11 and pip install ".[docs]"')
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    for file in ("zensical.toml", "README.md"):
        shutil.copy(REPOSITORY / file, tmp_path)
    for package in PACKAGES:
        (tmp_path / package).symlink_to(REPOSITORY / package)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("\n[x](nothing.md) [x](choosing.md#nothing) [x][commhooks.nothing]\n")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode != 0 and "3 issues found" in done.stdout + done.stderr, (
        done.stdout + done.stderr
    )
    first = (tmp_path / "site" / "index.html").read_text()  # it includes README
    assert "--8&lt;--" not in first and "--8<--" not in first
    assert all(
        f'id="{section}"' in first for section in ("time-to-the-same-loss", "what-a-run-survives")
    )
    assert first.count('class="language-diff') == 4 and 'src="figures/time_to_loss.png"' in first
    formulas = (tmp_path / "site" / "algorithm" / "index.html").read_text()
    assert formulas.count('class="arithmatex"') > 20 and "$$" not in formulas
    assert 'id="commhooks.attach"' in (tmp_path / "site" / "reference" / "index.html").read_text()
    # What assets/diff.js needs to copy the new version of a diff: the class, and a span per line.
    migrating = (tmp_path / "site" / "migrating" / "index.html").read_text()
    assert (
        re.search(r'class="language-diff .*<code><span id="__span-', migrating)
        and "assets/diff.js" in migrating
    )
