"""Tells whether there is a C compiler, and builds libraries as on other machines."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from unittest import mock

import pytest

from commhooks.compressors.native import library


def _compiles() -> bool:
    """Whether a program with a header of the C library can be compiled."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "")
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        command = [
            *compiler.split(),
            "-x",
            "c",
            "-shared",
            "-fPIC",
            "-o",
            os.path.join(folder, "a.so"),
            "-",
        ]
        return (
            subprocess.run(command, input=b"#include <math.h>\n", capture_output=True).returncode
            == 0
        )
    return False


HAS_COMPILER = _compiles()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")


def compile_kernels() -> None:
    """Compile the library unless the cache has it. A failure shows in the tests that need it."""
    with contextlib.suppress(Exception):
        library.load()


@contextlib.contextmanager
def another_library(*flags: str, compiler: str | None = None) -> Iterator[None]:
    """Context manager: use a library that this compiler (None: the usual one) builds with
    additional flags. The cache keeps it, because several tests use the same flags.
    """
    sources = {source: (*of_source, *flags) for source, of_source in library.SOURCES.items()}
    library.load.cache_clear()
    try:
        with mock.patch.dict(os.environ, {} if compiler is None else {"CC": compiler}):
            with mock.patch.object(library, "SOURCES", sources):
                yield
    finally:
        library.load.cache_clear()
