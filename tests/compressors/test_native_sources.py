"""The native kernels compile without a warning: with gcc and clang where these are, for every dtype and length of
vectors."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import commhooks
from commhooks.compressors.native import library
from commhooks.compressors.powersgd import fused_codec
from commhooks.compressors.quantized import native_blocks

SOURCES = {fused_codec.SOURCE: fused_codec.FLAGS, native_blocks.SOURCE: native_blocks.FLAGS}
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")  # psabi: vectors in arguments, but of inlined functions only
VECTORS = [(), ("-mno-avx512f", "-O1"), ("-mno-avx", "-O1")] if platform.machine() == "x86_64" else [()]


def test_these_are_all_sources() -> None:
    package = Path(commhooks.__file__).parent
    assert set(SOURCES) == set(package.rglob("*.c"))


@pytest.mark.parametrize("vectors", VECTORS, ids=str)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_no_warning(compiler: str, vectors: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    for source, flags in SOURCES.items():
        for real in library.C_TYPES.values():
            command = [compiler, *library.FLAGS, *flags, *WARNINGS, *vectors, f"-DREAL={real}"]
            command += [f"-I{library.HEADERS}", str(source), "-o", str(tmp_path / "library.so")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=280)
            assert done.returncode == 0, (command, done.stderr)
