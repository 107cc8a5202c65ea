"""pyproject.toml, the plugins and `make test-versions` name the same oldest versions; who has an older one is told."""

import os
import re
import subprocess
from types import ModuleType

import pytest

from commhooks.errors import OLDEST, check_version
from tests.support import warm
from tests.support.repository import REPOSITORY
from tests.versions import version_sets as sets

DOCS = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
BOUNDS = re.findall(r'"(torch|omegaconf|lightning|accelerate|transformers)>=([\d.]+)', PYPROJECT)
IN_THE_TABLE = ("torch", "lightning", "accelerate", "transformers")


def test_the_bounds_are_the_oldest_versions_that_were_run():
    oldest = sets.SETS[sets.OLDEST]
    assert {package for package, _ in BOUNDS} == {"torch", "omegaconf", "lightning", "accelerate", "transformers"}
    assert all(version == oldest[package] for package, version in BOUNDS)
    assert {package.replace("_", "-"): version for package, version in OLDEST.items()}.items() <= oldest.items()


@pytest.mark.parametrize("name", sorted(OLDEST))
def test_an_older_framework_is_told_which_one_to_install(name):
    framework = ModuleType(name)
    for framework.__version__ in (OLDEST[name], f"{OLDEST[name]}rc1+local", "100.0"):
        check_version(framework)
    for framework.__version__ in ("0.9", "1.9.9.post1"):
        with pytest.raises(
            ImportError, match=rf"commhooks needs {name} {OLDEST[name]} or newer, and {framework.__version__}"
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
    done = subprocess.run([warm.python(), script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.stdout.startswith("commhooks needs pytorch_lightning 2.6.0 or newer, and 2.5.0"), done.stderr
