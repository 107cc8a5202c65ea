"""Compile the C kernels on this machine, load them, and compare builds.

The first hook that needs them compiles all sources, for float and for double, into one shared
library, which is kept in the user's cache folder.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from commhooks.errors import HookConfigError
from commhooks.gradients.precision import processor_lines

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-std=gnu11", "-fPIC", "-fvisibility=default")
SOURCES = {
    "powersgd.c": ("-ffp-contract=fast",),
    # round every operation, as torch does
    "quantized.c": ("-ffp-contract=off", "-fno-trapping-math"),
}
"""The sources, with compiler flags in addition to `FLAGS`."""
C_TYPES = {torch.float32: "float", torch.float64: "double"}
"""The dtypes in which the kernels compute, and the values of `REAL` in the sources."""
COMPILE_LIMIT_S = 60.0
"""Time limit for the compiler. Compiling takes one or two seconds; other ranks wait for this one.
"""
SWITCH = "COMMHOOKS_NATIVE"
"""The environment variable that disables the C and Triton kernels: COMMHOOKS_NATIVE=0."""
_MESSAGE_LENGTH = 500
_TABLE = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
"""The first arguments of every function, passed by `Table.run`: `GOMP_parallel`, threads, rows,
first row.
"""
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "form_p": (ctypes.c_double,),
    "form_q": (),
    "split": (),
    "unit_rows": (ctypes.c_int, ctypes.c_double),
    "quantise": (
        ctypes.c_int,
        ctypes.c_double,
        ctypes.c_double,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_size_t,
    ),
    "dequantise": (ctypes.c_int,),
    "add_dequantised": (ctypes.c_int,),
}
"""The functions in the sources, with the types of their other arguments."""


def is_switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def build(device: torch.device, results_of: Callable[[torch.dtype], bytes]) -> str:
    """Return the id of this machine's build of some kernels, for `Compressor.native_build`.

    It is a hash of the sources and of their results for `fixed_numbers` (`results_of`); "" if the
    kernels are turned off. Raises HookConfigError if the library cannot be loaded; see `load`.

    Two builds of the same sources may differ in the last bits: the vector length of the processor
    determines the order of sums, and the compiler decides which multiplications and additions it
    contracts.
    """
    if device.type != "cpu" or is_switched_off():
        return ""
    try:
        return _build(load(), results_of)
    except HookConfigError as error:
        reason = textwrap.shorten(str(error), _MESSAGE_LENGTH)
        raise HookConfigError(
            f"{reason} (it is several times faster than torch; {SWITCH}=0 turns it off)"
        ) from error


@functools.cache
def _build(library: ctypes.CDLL, results_of: Callable[[torch.dtype], bytes]) -> str:
    digest = hashlib.sha256(source_text())
    for dtype in C_TYPES:
        digest.update(results_of(dtype))
    return digest.hexdigest()[:12]


def fixed_numbers(numel: int, start: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers between -0.5 and 0.5 that have the same bits on every machine."""
    counted = torch.arange(start, start + numel, dtype=torch.float64)
    return ((counted * 0.6180339887498949).frac() - 0.5).to(dtype)


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library; compile it first if it is not in the cache.

    Raises HookConfigError, with a remedy, if that fails.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise HookConfigError(
            "the native kernel is compiled on the machine, and no C compiler was found: install one"
            " (gcc or clang), or name one in the environment variable CC"
        )
    try:
        with _cache_folder() as folder:
            library = _load_or_compile(compiler.split(), folder / f"kernels_{_key(compiler)}.so")
    # The disk is full, or libraries cannot be loaded from the temporary folder either.
    except OSError as error:
        raise HookConfigError(
            "the compiled native kernel cannot be saved or loaded; set XDG_CACHE_HOME to a folder"
            " that is writable and allows execution, or CC to another compiler. The system"
            f" reports: {error}"
        ) from error
    for name, types in _FUNCTIONS.items():
        for real in C_TYPES.values():
            getattr(library, f"commhooks_{name}_{real}").argtypes = (*_TABLE, *types)
    return library


def _key(compiler: str) -> str:
    # The processor is part of it: machines with different processors may share a home folder.
    described = sorted(set(processor_lines("flags", "Features", "model name")))
    processor = described or platform.processor()
    built_from = (compiler, FLAGS, SOURCES, platform.machine(), processor)
    return hashlib.sha256(source_text() + repr(built_from).encode()).hexdigest()[:16]


def function(name: str, dtype: torch.dtype) -> Callable[..., int]:
    """Return a function of the library for numbers of `dtype`.

    It returns 0, or -1 if memory runs out.
    """
    exported: Callable[..., int] = getattr(load(), f"commhooks_{name}_{C_TYPES[dtype]}")
    return exported


def source_text() -> bytes:
    # no files left behind by editors
    paths = [*(FOLDER / name for name in SOURCES), *sorted(FOLDER.glob("*.h"))]
    return b"".join(path.read_bytes() for path in paths if path.is_file())


def _load_or_compile(compiler: Sequence[str], library: Path) -> ctypes.CDLL:
    if library.exists():
        with contextlib.suppress(OSError):  # a damaged library is compiled again
            return ctypes.CDLL(str(library))
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        made = Path(temporary, library.name)
        _compile(compiler, made)
        with made.open("r+b") as written:
            # loading a library that a power cut has truncated would end the process
            os.fsync(written.fileno())
        os.replace(made, library)  # atomic: several ranks may do this at once
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(library))
    # The home folder may be mounted noexec: load a copy from the temporary folder.
    with tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True) as temporary:
        return ctypes.CDLL(shutil.copy(library, temporary))


def _compile(compiler: Sequence[str], library: Path) -> None:
    commands = []
    objects = []
    for source, flags in SOURCES.items():
        for real in C_TYPES.values():
            object_file = str(library.parent / f"{source}_{real}.o")
            what = [f"-DREAL={real}", "-c", str(FOLDER / source), "-o", object_file]
            commands.append([*compiler, *FLAGS, *flags, *what])
            objects.append(object_file)
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, commands))
    _run([*compiler, "-shared", *objects, "-lm", "-o", str(library)])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_LIMIT_S
        )
        if done.returncode == 0 and Path(command[-1]).exists():
            return
        output = done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        output = str(error)
    raise HookConfigError(
        f"the native kernel cannot be compiled: {' '.join(command)} failed; repair the"
        " compiler, or name another one in the environment variable CC. Its output:"
        f" {output.strip() or 'nothing'}"
    )


@contextlib.contextmanager
def _cache_folder() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError):  # there is no home folder
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "commhooks"
        if _is_private(folder):
            yield folder
            return
    with tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)  # deleted afterwards: a loaded library does not need its file


def _is_private(folder: Path) -> bool:
    """Return whether only the user can write to `folder`, because code is loaded from it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    # Windows has no user ids; home folders are private there.
    owned = not hasattr(os, "getuid") or (
        status.st_uid == os.getuid() and not status.st_mode & 0o022
    )
    return owned and os.access(folder, os.W_OK)
