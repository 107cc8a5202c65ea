"""Write several files as one: all of them change, or none.

A killed process leaves temporary files `.NAME.RANK.tmp`. They are never read; the next save in the folder overwrites
them.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch


def write_together(files: Iterable[tuple[Path, dict[str, Any] | None]], rank: int) -> None:
    """Save each content at its path; None removes a file of an earlier save. Readers see the old or the new content of
    each file, never a part of it, and after an error while writing, such as a full disk, no file has changed.

    Raises:
        OSError: a file could not be written; the error names it and the reason.
    """
    temporary: dict[Path, Path | None] = {}  # by final path
    try:
        for path, content in files:
            temporary[path] = None
            if content is not None:
                temporary[path] = beside = path.with_name(f".{path.name}.{rank}.tmp")
                with _naming(path), open(beside, "wb") as file:
                    _save(content, file)
                    file.flush()
                    os.fsync(file.fileno())  # or a power cut may leave the new name with nothing behind it
        for path, written in sorted(temporary.items(), key=lambda each: each[1] is None):  # those to remove come last
            with _naming(path):
                if written is None:
                    path.unlink(missing_ok=True)
                else:
                    os.replace(written, path)
    finally:
        for written in filter(None, temporary.values()):
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch 2.13 meets the error of the disk, and raises another one: "unexpected pos 640 vs 598".
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make OSErrors of the body name `path` instead of the temporary file or no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
