"""Cases for `compare_versions.py`, and what is noted of them: results, log lines and warnings as plain types."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import commhooks

ROOT = str(Path(str(commhooks.__file__)).parents[1])


@dataclasses.dataclass(frozen=True)
class Case:
    """`function(*arguments)` on that many ranks. `many`: it returns a dict of cases. `pickles`: its result is for
    `resume-pickles`, and not compared."""

    world_size: int
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    quiet: bool = False
    many: bool = False
    pickles: bool = False

    @property
    def full_name(self) -> str:
        return f"{self.world_size} ranks: {self.name}"


def observed(case: Case, data: Any = None) -> Any:
    """Run a case on this rank: what it returns and what it says, as plain types."""
    handler = _Handler()
    logger = logging.getLogger("commhooks")
    logger.setLevel(logging.WARNING if case.quiet else logging.DEBUG)
    logger.addHandler(handler)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()) as stderr:
            warnings.simplefilter("always")
            found = case.function(*case.arguments) if data is None else case.function(*data)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    if case.pickles:
        return found
    if case.many:
        return plain(found)
    said = {
        "log": handler.lines,
        "debug log": handler.debug,
        "stderr": stderr.getvalue().splitlines(),
        "warnings": [f"{w.category.__name__}: {w.message}" for w in caught if w.filename.startswith(ROOT)],
    }
    return plain({"found": found} | said)


class _Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.debug: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        where = self.debug if record.levelno == logging.DEBUG else self.lines
        where.append(f"{record.levelname}: {record.getMessage()}")


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is logged in the body, debugging left out."""
    handler = _Handler()
    logging.getLogger("commhooks").addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger("commhooks").removeHandler(handler)


def plain(value: Any) -> Any:
    """Tensors as dtype, shape and bytes; text without what differs from run to run."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense().contiguous().reshape(-1)
        return {
            "tensor": str(value.dtype),
            "shape": list(value.shape),
            "bytes": dense.view(torch.uint8).numpy().tobytes(),
        }
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    return tidy(value if isinstance(value, str) else repr(value))


def tidy(text: str) -> str:
    """Without addresses, the names of this run's folders, and the lines of code that torch adds to some errors."""
    text = text.partition("\n\nAt:\n")[0]
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text.replace(ROOT, "<root>"))
    return re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+", "<tmp>", text).replace(sys.executable, "<python>")
