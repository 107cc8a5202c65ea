"""The frameworks that the plugins need, and their oldest versions."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

OLDEST = {
    "accelerate": "1.10.0",
    "lightning": "2.6.0",
    "lightning_fabric": "2.6.0",
    "pytorch_lightning": "2.6.0",
    "transformers": "5.3.0",
}
"""As in pyproject.toml, where docs/versions.md is named, which has the reasons."""


def check_version(framework: ModuleType) -> None:
    """Check that `framework`, one of `OLDEST`, is not too old.

    Raises:
        ImportError: it is.
    """
    name, version = framework.__name__, framework.__version__
    if _numbers(version) < _numbers(OLDEST[name]):
        raise ImportError(
            f"commhooks needs {name} {OLDEST[name]} or newer, and {version} is installed: "
            f'pip install --upgrade "{name.replace("_", "-")}>={OLDEST[name]}"'
        )


@contextmanager
def needed(*packages: str, sentence: str) -> Iterator[None]:
    """Import the `packages`, which are some of `OLDEST`, in the body.

    Raises:
        ImportError: one is not installed, with the `sentence`, which says what to install; or it is too old.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        raise ImportError(sentence) from error
    for each in packages:
        check_version(sys.modules[each])


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 6, 0) of "2.6.0rc1+local", and of "2.6"."""
    found = re.match(r"\d+(\.\d+){0,2}", version)
    return tuple(map(int, f"{found[0]}.0.0".split(".")))[:3] if found else (0, 0, 0)
