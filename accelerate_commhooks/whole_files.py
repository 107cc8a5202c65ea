"""Write several files atomically: readers see the old or the new content of each file, never a part of it.

    with WholeFiles(rank) as files:
        files.write(content, path)      # into a temporary file beside `path`
        files.remove(other)
    # Here all files have their final names. After an error inside, such as a full disk, none has changed.

A killed process leaves a temporary file `.NAME.RANK.tmp`. It is never read; the next save in the folder overwrites it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch


class WholeFiles:
    """A set of files that one rank writes and removes together.

    Raises:
        OSError: a file could not be written; the error names the file and the reason.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._written: dict[Path, Path] = {}  # final path -> temporary path
        self._removed: list[Path] = []

    def write(self, content: dict[str, Any], path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{self._rank}.tmp")
        self._written[path] = temporary
        with _naming(path), open(temporary, "wb") as file:
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave the new name with nothing behind it

    def remove(self, path: Path) -> None:
        """Remove a file of an earlier save if it exists, at the same time as the files are renamed."""
        self._removed.append(path)

    def __enter__(self) -> "WholeFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for path, temporary in self._written.items():
                    with _naming(path):
                        os.replace(temporary, path)
                for path in self._removed:
                    with _naming(path):
                        path.unlink(missing_ok=True)
        finally:
            for temporary in self._written.values():
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    """As `torch.save`, but raises the OSError of the disk, which torch 2.13 replaces by `RuntimeError: unexpected pos
    640 vs 598`."""
    watched = _Watched(file)
    try:
        torch.save(content, watched)  # type: ignore[arg-type]
    except Exception as error:
        if watched.error is None:
            raise
        raise watched.error from error


class _Watched:
    """A writable file that records the error of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make OSErrors of the body name `path` instead of the temporary file or no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
