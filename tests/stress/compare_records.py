"""What `compare_versions.py` notes of a case, as plain types, and how two such notes differ."""

import contextlib
import io
import logging
import re
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import commhooks

PACKAGES = str(Path(str(commhooks.__file__)).parents[1])


def observed(function: Callable[[], Any], quiet: bool) -> dict[str, Any]:
    """What a function returns and what it says, as plain types. `quiet`: without logging."""
    torch.manual_seed(0)
    with contextlib.ExitStack() as around:
        stderr = around.enter_context(contextlib.redirect_stderr(io.StringIO()))
        lines = [] if quiet else around.enter_context(_log_lines())
        caught = around.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        found = {"found": function()}
    # apart, because the former is long
    for name, debugging in (
        ("debug log", True),
        ("log", False),
    ):
        found[name] = [each for each in lines if each.startswith("DEBUG") == debugging]
    said = [
        f"{w.category.__name__}: {w.message}" for w in caught if w.filename.startswith(PACKAGES)
    ]
    return plain(found | {"stderr": stderr.getvalue().splitlines(), "warnings": said})


@contextlib.contextmanager
def _log_lines() -> Iterator[list[str]]:
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("commhooks")
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def plain(value: Any) -> Any:
    """Tensors as dtype, shape and bytes; text without what differs from run to run."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense().contiguous().reshape(-1)
        content = dense.view(torch.uint8).numpy().tobytes()
        return {"tensor": str(value.dtype), "shape": list(value.shape), "bytes": content}
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    return tidy(value if isinstance(value, str) else repr(value))


def tidy(text: str) -> str:
    """Without addresses, the names of this run's folders, and the lines of code that torch adds to
    some errors.
    """
    text = text.partition("\n\nAt:\n")[0]
    text = re.sub(r"0x[0-9a-f]{6,}", "0x...", text.replace(PACKAGES, "<root>"))
    return re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+", "<tmp>", text).replace(
        sys.executable, "<python>"
    )


def differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(where, what) of everything that is not the same; types, the order of keys and the bits of
    numbers count.
    """
    if type(a) is not type(b):
        yield key, f"{_short(a)} -> {_short(b)}"
    elif isinstance(a, dict) and "tensor" in a and "bytes" in a:
        if a != b:
            yield key, _tensors(a, b)
    elif isinstance(a, (dict, list, tuple)):
        if not isinstance(a, dict):
            a, b = dict(enumerate(a)), dict(enumerate(b))
        for missing in [each for each in a if each not in b]:
            yield f"{key}/{missing}", f"{_short(a[missing])} -> nothing"
        for more in [each for each in b if each not in a]:
            yield f"{key}/{more}", f"nothing -> {_short(b[more])}"
        common = [each for each in a if each in b]
        if common != [each for each in b if each in a]:
            yield key, f"another order of keys: {_short(list(a))} -> {_short(list(b))}"
        for each in common:
            yield from differences(a[each], b[each], f"{key}/{each}")
    elif isinstance(a, float):
        if struct.pack("d", a) != struct.pack("d", b):
            yield key, f"{a!r} -> {b!r}"
    elif a != b:
        yield key, f"{_short(a, b)} -> {_short(b, a)}"


def _tensors(a: dict[str, Any], b: dict[str, Any]) -> str:
    if (a.get("tensor"), a.get("shape")) != (b.get("tensor"), b.get("shape")) or not a["bytes"]:
        return f"{a['tensor']} {a['shape']} -> {b.get('tensor')} {b.get('shape')}"
    x, y = (
        torch.frombuffer(bytearray(t["bytes"]), dtype=getattr(torch, t["tensor"][6:]))
        for t in (a, b)
    )
    distance = (x - y).abs().double() if x.is_complex() else (x.double() - y.double()).abs()
    return (
        f"{int((x != y).sum())} of {x.numel()} numbers differ, by up to {distance.max().item():.3g}"
    )


def _short(value: Any, other: Any = "") -> str:
    """A part of it; of a text the part from where it differs from another one."""
    if isinstance(value, str) and isinstance(other, str) and len(value) > 150:
        first = next(
            (n for n, (x, y) in enumerate(zip(value, other, strict=False)) if x != y), len(other)
        )
        value = value[max(0, first - 40) :]
    text = repr(value)
    return text if len(text) <= 150 else f"{text[:150]}..."
