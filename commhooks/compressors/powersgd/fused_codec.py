"""The codec's passes over a matrix as a small native kernel (`fused_codec.c`), for float32 on the CPU.

Used where all ranks have it (see `native_kernel`). `codec` is the reference; the results are equal up to rounding.
Each pass reads the matrix once, where `codec` reads it several times. The machine's C compiler compiles the kernel at
its first use, which takes about a second; the library is kept in the user's cache folder.
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
from pathlib import Path

import torch

from commhooks.compressors.powersgd import codec
from commhooks.errors import HookConfigError

SOURCE = Path(__file__).with_name("fused_codec.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC")
COMPILE_LIMIT_S = 60.0
"""It takes about a second; other ranks wait for this one."""


class FusedCodec:
    """The functions of `codec` that read or write whole matrices; see `codec` for shapes."""

    reconstruct = staticmethod(codec.reconstruct)
    remainder = staticmethod(codec.remainder)

    def __init__(self, library: ctypes.CDLL) -> None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._add_and_project = library.commhooks_add_and_project
        self._add_and_project.argtypes = [size, size, size, pointer, pointer, ctypes.c_float, pointer, pointer]
        self._project_q = library.commhooks_project_q
        self._project_q.argtypes = [size, size, size, pointer, pointer, pointer]
        self._split = library.commhooks_split
        self._split.argtypes = [size, size, size, *[pointer] * 6]
        for function in (self._add_and_project, self._project_q, self._split):
            function.restype = None
        self._unit_rows = library.commhooks_unit_rows
        self._unit_rows.argtypes = [size, size, ctypes.c_int, ctypes.c_double, pointer, pointer]
        self._unit_rows.restype = ctypes.c_int

    def add_and_project(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        factor: float,
        q: torch.Tensor,
        rank: int,
        out: torch.Tensor,
    ) -> None:
        address = None if residual is None else _address(residual)
        self._add_and_project(*delta.shape, rank, _address(delta), address, factor, _address(q), _address(out))

    def project_q(self, delta: torch.Tensor, p: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        self._project_q(*delta.shape, rank, _address(delta), _address(p), _address(out))

    def split(
        self,
        delta: torch.Tensor,
        local: codec.Factors,
        mean: codec.Factors,
        rank: int,
        residual: torch.Tensor,
    ) -> None:
        addresses = [_address(each) for each in (delta, residual, *local, *mean)]
        self._split(*delta.shape, rank, *addresses)

    def unit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._few_rows(rows, False) or codec.unit_rows(rows)

    def orthonormal_rows(
        self, rows: torch.Tensor, refill: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (refill is None and self._few_rows(rows, True)) or codec.orthonormal_rows(rows, refill)

    def _few_rows(self, rows: torch.Tensor, orthogonal: bool) -> tuple[torch.Tensor, None] | None:
        """The rows scaled to norm 1, orthonormalised if `orthogonal`. None if rows are dependent or if there are more
        than `_FEW_ROWS`: the caller then uses `codec`."""
        if len(rows) > _FEW_ROWS:
            return None
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        least = 10 * torch.finfo(rows.dtype).eps
        missing = self._unit_rows(*rows.shape, orthogonal, least, _address(rows), _address(out))
        return None if missing else (out, None)


_FEW_ROWS = 4


@functools.cache
def load() -> FusedCodec:
    """Load the kernel; compile it first if the cache does not hold it.

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
    try:
        text = SOURCE.read_bytes()
        # The key includes the processor: machines with different processors may share a home folder.
        key = hashlib.sha256(text + repr((compiler, FLAGS, platform.machine(), _processor())).encode()).hexdigest()[:16]
        with contextlib.ExitStack() as stack:
            folder = _cache_folder()
            if folder is None:  # a loaded library does not need its file
                made = tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(made))
            return _load_or_compile(compiler, folder / f"fused_codec_{key}.so")
    except OSError as error:  # the disk is full, or libraries cannot be loaded from the temporary folder either
        raise HookConfigError(
            "the compiled native kernel cannot be kept or loaded; name a folder in the environment variable "
            "XDG_CACHE_HOME that takes files and from which programs may run, or another compiler in CC. The system "
            f"says: {error}"
        ) from error


def _load_or_compile(compiler: str, library: Path) -> FusedCodec:
    if library.exists():
        with contextlib.suppress(OSError):  # a damaged library is compiled again
            return FusedCodec(ctypes.CDLL(str(library)))
    _compile(compiler, library)
    with contextlib.suppress(OSError):
        return FusedCodec(ctypes.CDLL(str(library)))
    # The home folder may be mounted noexec: load a copy from the temporary folder.
    with tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True) as temporary:
        return FusedCodec(ctypes.CDLL(shutil.copy(library, temporary)))


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        made = Path(temporary, library.name)
        command = [*compiler.split(), *FLAGS, "-o", str(made), str(SOURCE)]
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
        os.replace(made, library)  # atomic: several ranks may do this at once


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel computes in `dtype` on `device`."""
    return device.type == "cpu" and dtype == torch.float32


def check_supported(device: torch.device, dtype: torch.dtype) -> None:
    """Raise HookConfigError unless the kernel supports this compute dtype (float32) and this device (CPU)."""
    if not supports(device, dtype):
        raise HookConfigError(
            f"fused=True works on the CPU with float32 arithmetic (parameters in float32, bfloat16 or float16), and "
            f"here are gradients in {str(dtype).removeprefix('torch.')} on {device}: leave out fused=True"
        )


def _address(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous() and tensor.dtype == torch.float32
    return tensor.data_ptr()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _cache_folder() -> Path | None:
    """The folder in which libraries are kept; None if there is none that only this user can write to."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "commhooks"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Security: code is loaded from this folder, so the user must own it. Windows has no user ids; home folders are
        # private there.
        own = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        if own and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        pass
    return None
