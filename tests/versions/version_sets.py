"""The sets of versions that the tests are run with: the oldest that `pyproject.toml` allows, one
between, the newest.

`make test-versions` installs them, `docs/versions.md` has the results, and
tests/project/test_versions.py checks that the three agree. All other packages are as in
constraints-dev.txt, which is the set of `make test`.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# All of Lightning's packages: `lightning` contains `lightning.pytorch` and installs
# `pytorch-lightning`, which needs `lightning-fabric`.
SETS: dict[str, dict[str, str]] = {
    "2.8": {
        "torch": "2.8.0",
        "lightning": "2.6.0",
        "pytorch-lightning": "2.6.0",
        "lightning-fabric": "2.6.0",
        "accelerate": "1.10.0",
        "transformers": "5.3.0",
        "omegaconf": "2.3.0",
        "torchft": "0.2.0",
    },
    "2.11": {
        "torch": "2.11.0",
        "lightning": "2.6.1",
        "pytorch-lightning": "2.6.1",
        "lightning-fabric": "2.6.1",
        "accelerate": "1.13.0",
        "transformers": "5.5.0",
        "setuptools": "81.0.0",  # torch 2.11 wants one below 82
    },
    "2.15": {
        "torch": "2.15.0",
        "lightning": "2.6.6",
        "pytorch-lightning": "2.6.6",
        "lightning-fabric": "2.6.6",
        "accelerate": "1.15.0",
        "transformers": "5.23.0",
    },
}
OLDEST, *_, NEWEST = SETS


def pinned() -> dict[str, str]:
    """Return the name and version of every line of constraints-dev.txt."""
    lines = (ROOT / "constraints-dev.txt").read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", "\n".join(lines), re.MULTILINE))


def constraints(name: str) -> str:
    """Return pip's constraints for a set: those of `make test`, with the set's versions."""
    versions = SETS[name]
    others = [
        line
        for line in (ROOT / "constraints-dev.txt").read_text().splitlines()
        if line.partition("==")[0] not in versions
    ]
    return (
        "\n".join([*others, *(f"{package}=={version}" for package, version in versions.items())])
        + "\n"
    )
