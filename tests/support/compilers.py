"""Whether this machine has a C compiler, which the native kernels need."""

import contextlib
import os
import shutil
import subprocess
import tempfile

import pytest
import torch

from commhooks.compressors.powersgd import native_products
from commhooks.compressors.quantized import native_blocks


def _compiles() -> bool:
    """Whether a program with a header of the C library can be compiled."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "")
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        command = [*compiler.split(), "-x", "c", "-shared", "-fPIC", "-o", os.path.join(folder, "a.so"), "-"]
        return subprocess.run(command, input=b"#include <math.h>\n", capture_output=True).returncode == 0
    return False


HAS_COMPILER = _compiles()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")


def compile_kernels() -> None:
    """Those that the cache does not hold. What fails here fails in their tests."""
    for module in (native_products, native_blocks):
        for dtype in (torch.float32, torch.float64):
            with contextlib.suppress(Exception):
                module.load(dtype)
