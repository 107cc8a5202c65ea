"""Where things are, for tests that start scripts or read files of the repository."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
REPOSITORY = TESTS.parent
PYTHONPATH = str(REPOSITORY)
"""For processes that import the packages of this copy and `tests`."""
