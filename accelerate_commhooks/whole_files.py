"""Files of which whoever reads finds the old content or the new one, and never a part of it.

    with WholeFiles(rank) as files:
        files.write(content, path)      # into a temporary file beside `path`
        files.remove(other)
    # Here all of them have their names. After an error inside, a full disk for one, none has changed.

A process that is killed leaves a temporary file behind, `.NAME.RANK.tmp`. Nobody reads it; the next save in the folder
writes over it.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch


class WholeFiles:
    """Files that one rank writes and removes together.

    Raises:
        OSError: with the name of the file that could not be written and why.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._written: dict[Path, Path] = {}  # what has its name when all are written -> what it is called until then
        self._removed: list[Path] = []

    def write(self, content: dict[str, Any], path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{self._rank}.tmp")
        self._written[path] = temporary
        with _naming(path), open(temporary, "wb") as file:
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave the new name with nothing behind it

    def remove(self, path: Path) -> None:
        """Remove a file of an earlier save, if it is there."""
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
    """As `torch.save`, with the error of the disk: torch 2.13 makes `RuntimeError: unexpected pos 640 vs 598` of it."""
    watched = _Watched(file)
    try:
        torch.save(content, watched)  # type: ignore[arg-type]
    except Exception as error:
        if watched.error is None:
            raise
        raise watched.error from error


class _Watched:
    """A file to write to that keeps the error."""

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
    """Errors of the operating system name `path`, not the temporary file or nothing at all."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
