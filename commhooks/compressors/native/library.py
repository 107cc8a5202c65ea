"""Compile a kernel's C source on this machine, keep the library, and load it.

A kernel is a C file in a folder of its own, with headers there and in this folder. The machine's C compiler compiles it
when it is first used, once per dtype, which takes about a second; the libraries are kept in the user's cache folder.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from commhooks.errors import HookConfigError
from commhooks.gradients.precision import processor_lines

HEADERS = Path(__file__).parent
"""The folder of the headers that any kernel may include."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=default")
C_TYPES = {torch.float32: "float", torch.float64: "double"}
"""Compute dtypes of the kernels, and what `REAL` is in their source then."""
COMPILE_LIMIT_S = 60.0
"""It takes about a second; other ranks wait for this one."""
SWITCH = "COMMHOOKS_NATIVE"
"""The environment variable with which users switch native kernels off."""


def load(source: Path, flags: Sequence[str], dtype: torch.dtype) -> ctypes.CDLL:
    """Load the kernel `source` for a compute dtype, float32 or float64; compile it first if the cache does not hold it.

    Args:
        flags: for the compiler, after `FLAGS`.

    Raises:
        HookConfigError: there is no C compiler, it fails, or the library cannot be loaded; the message gives the
            remedy.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise HookConfigError(
            "the native kernel is compiled on the machine, and no C compiler was found: install one (gcc or clang), "
            "or name one in the environment variable CC"
        )
    flags = (*FLAGS, *flags, f"-DREAL={C_TYPES[dtype]}")
    try:
        processor = sorted(set(processor_lines("flags", "Features", "model name"))) or platform.processor()
        # The key includes the processor: machines with different processors may share a home folder.
        key = hashlib.sha256(
            source_text(source) + repr((compiler, flags, platform.machine(), processor)).encode()
        ).hexdigest()[:16]
        with contextlib.ExitStack() as stack:
            folder = _cache_folder()
            if folder is None:  # a loaded library does not need its file
                made = tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(made))
            command = (*compiler.split(), *flags, f"-I{HEADERS}", str(source), "-lm")
            return _load_or_compile(command, folder / f"{source.stem}_{key}.so")
    except OSError as error:  # the disk is full, or libraries cannot be loaded from the temporary folder either
        raise HookConfigError(
            "the compiled native kernel cannot be kept or loaded; name a folder in the environment variable "
            "XDG_CACHE_HOME that takes files and from which programs may run, or another compiler in CC. The system "
            f"says: {error}"
        ) from error


def source_text(source: Path) -> bytes:
    """The kernel and the headers that it may include, one after another. Whatever else lies in their folders, such as
    what an editor or a system leaves there, is not part of it."""
    headers = [path for folder in (source.parent, HEADERS) for path in sorted(folder.glob("*.h")) if path.is_file()]
    return b"".join(path.read_bytes() for path in (source, *headers))


def build_of(source: Path, results_of: Callable[[torch.dtype], bytes]) -> str:
    """`Kernel.build` of this machine: a hash of the source, and of what the kernel computes in each dtype."""
    digest = hashlib.sha256(source_text(source))
    for dtype in C_TYPES:
        digest.update(results_of(dtype))
    return digest.hexdigest()[:12]


def fixed_numbers(numel: int, start: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers from which a kernel computes what tells its build apart: between -0.5 and 0.5, the same bits on every
    machine, because float64 products and rounding are exact rules."""
    counted = torch.arange(start, start + numel, dtype=torch.float64)
    return ((counted * 0.6180339887498949).frac() - 0.5).to(dtype)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels compute in `dtype` on `device`."""
    return device.type == "cpu" and dtype in C_TYPES


def is_switched_off() -> bool:
    """Whether COMMHOOKS_NATIVE=0 is set. Ranks may differ in it: all compute with torch then."""
    return os.environ.get(SWITCH) == "0"


def _load_or_compile(command: Sequence[str], library: Path) -> ctypes.CDLL:
    if library.exists():
        with contextlib.suppress(OSError):  # a damaged library is compiled again
            return ctypes.CDLL(str(library))
    _compile(command, library)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(library))
    # The home folder may be mounted noexec: load a copy from the temporary folder.
    with tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True) as temporary:
        return ctypes.CDLL(shutil.copy(library, temporary))


def _compile(command: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        made = Path(temporary, library.name)
        command = [*command, "-o", str(made)]
        said = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILE_LIMIT_S)
            failed, said = done.returncode != 0 or not made.exists(), done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            failed, said = True, str(error)
        if failed:
            raise HookConfigError(
                f"the native kernel cannot be compiled: {' '.join(command)} failed; repair the compiler, or name "
                f"another one in the environment variable CC. It said: {said.strip() or 'nothing'}"
            )
        with made.open("r+b") as written:
            os.fsync(written.fileno())  # loading one that a power cut has truncated would end the process
        os.replace(made, library)  # atomic: several ranks may do this at once


def _cache_folder() -> Path | None:
    """The folder in which libraries are kept; None if there is none that only this user can write to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "commhooks"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Security: code is loaded from this folder, so only the user may own it and write to it. Windows has no user
        # ids; home folders are private there.
        status = folder.stat()
        private = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o022)
        if private and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        pass
    return None
