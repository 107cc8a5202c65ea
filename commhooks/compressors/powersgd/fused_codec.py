"""The codec's passes over a matrix as a small native kernel (`native/codec.c`), for the CPU.

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
from collections.abc import Sequence
from pathlib import Path

import torch

from commhooks.compressors.powersgd import codec
from commhooks.compressors.powersgd.kernel_tables import FactorTable, MatrixTable, address
from commhooks.compressors.powersgd.kernel_threads import team
from commhooks.errors import HookConfigError

SOURCE = Path(__file__).parent / "native" / "codec.c"
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC")
_C_TYPES = {torch.float32: "float", torch.float64: "double"}
COMPILE_LIMIT_S = 60.0
"""It takes about a second; other ranks wait for this one."""


class FusedCodec:
    """One build of the kernel, for one compute dtype: the functions of `codec` that read or write whole matrices, for
    one matrix (see `codec` for shapes) and for a table of matrices."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._library = library
        number = ctypes.c_double
        for name, more in (
            ("form_p", [number]),
            ("form_q", [number]),
            ("split", []),
            ("unit_rows", [ctypes.c_int, number]),
        ):
            function = getattr(library, f"commhooks_{name}")
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, *more]
            function.restype = ctypes.c_int

    # ---- tables ----------------------------------------------------------------------------------------------------

    def form_p_of(self, table: MatrixTable, factor: float) -> None:
        """`add_and_project` for all matrices of `table`, from `q` to `p`. Sets `table.largest`."""
        self._call("form_p", table, factor)

    def form_q_of(self, table: MatrixTable, factor: float = 0.0) -> None:
        """Add the residuals (fields that are not 0) to delta, then `project_q`, from `p` to `q`. Sets `largest`."""
        self._call("form_q", table, factor)

    def split_of(self, table: MatrixTable) -> None:
        """`split`; without the residual where that field is 0, and without the gradient where `mean_q` is 0."""
        self._call("split", table)

    def unit_rows_of(self, table: FactorTable, *, orthogonal: bool) -> None:
        """Scale rows to norm 1 and, if `orthogonal`, orthonormalise them. Non-finite numbers count as zero. Sets
        `table.missing`: rows that are zero or dependent; the result is of use only where that is 0."""
        least = 10 * torch.finfo(self.dtype).eps if orthogonal else 0.0
        self._call("unit_rows", table, orthogonal, least)

    def _call(self, name: str, table: MatrixTable | FactorTable, *more: float) -> None:
        start, threads = team(table.elements)
        if getattr(self._library, f"commhooks_{name}")(start, threads, len(table), table.rows.data_ptr(), *more):
            raise MemoryError(f"commhooks: no memory for the scratch space of {name}")

    # ---- one matrix ------------------------------------------------------------------------------------------------

    def add_and_project(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor | None,
        factor: float,
        q: torch.Tensor,
        rank: int,
        out: torch.Tensor,
    ) -> None:
        self.form_p_of(self._matrix(rank, delta, residual, out, q), factor)

    def project_q(self, delta: torch.Tensor, p: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        self.form_q_of(self._matrix(rank, delta, None, p, out))

    def split(
        self,
        delta: torch.Tensor,
        local: codec.Factors,
        mean: codec.Factors,
        rank: int,
        residual: torch.Tensor,
    ) -> None:
        self.split_of(self._matrix(rank, delta, residual, *local, *mean))

    def reconstruct(self, p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        self.split_of(self._matrix(rank, out, None, p, q, p, q))

    def remainder(self, delta: torch.Tensor, p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor) -> None:
        self.split_of(self._matrix(rank, delta, out, p, q, p, None))

    def unit_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._unit_rows(rows, None, False) or codec.unit_rows(rows)

    def orthonormal_rows(
        self, rows: torch.Tensor, refill: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._unit_rows(rows, refill, True) or codec.orthonormal_rows(rows, refill)

    def _matrix(self, rank: int, *tensors: torch.Tensor | None) -> MatrixTable:
        delta = tensors[0]
        assert delta is not None and all(x is None or x.dtype == self.dtype for x in tensors)
        return MatrixTable([[*delta.shape, rank, *[0 if x is None else address(x) for x in tensors]]])

    def _unit_rows(
        self, rows: torch.Tensor, refill: torch.Tensor | None, orthogonal: bool
    ) -> tuple[torch.Tensor, None] | None:
        """None if there are rows that are zero or dependent, and were not replaced."""
        rows, out = rows.contiguous(), torch.empty_like(rows, memory_format=torch.contiguous_format)
        assert rows.dtype == self.dtype and (refill is None or refill.dtype == self.dtype)
        table = FactorTable([[*rows.shape, address(rows), 0 if refill is None else address(refill), address(out)]])
        self.unit_rows_of(table, orthogonal=orthogonal)
        return None if any(table.missing) else (out, None)


@functools.cache
def load(dtype: torch.dtype = torch.float32) -> FusedCodec:
    """Load the kernel for a compute dtype, float32 or float64; compile it first if the cache does not hold it.

    Raises:
        HookConfigError: there is no C compiler, it fails, or the library cannot be loaded; the message gives the
            remedy.
    """
    flags = (*FLAGS, f"-DREAL={_C_TYPES[dtype]}")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None:
        raise HookConfigError(
            "the native kernel is compiled on the machine, and no C compiler was found: install one (gcc or clang), "
            "or name one in the environment variable CC"
        )
    try:
        # The key includes the processor: machines with different processors may share a home folder.
        key = hashlib.sha256(
            source_text() + repr((compiler, flags, platform.machine(), _processor())).encode()
        ).hexdigest()[:16]
        with contextlib.ExitStack() as stack:
            folder = _cache_folder()
            if folder is None:  # a loaded library does not need its file
                made = tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True)
                folder = Path(stack.enter_context(made))
            library = folder / f"fused_codec_{key}.so"
            return FusedCodec(_load_or_compile((*compiler.split(), *flags), library), dtype)
    except OSError as error:  # the disk is full, or libraries cannot be loaded from the temporary folder either
        raise HookConfigError(
            "the compiled native kernel cannot be kept or loaded; name a folder in the environment variable "
            "XDG_CACHE_HOME that takes files and from which programs may run, or another compiler in CC. The system "
            f"says: {error}"
        ) from error


def source_text() -> bytes:
    """The files of the kernel, one after another."""
    return b"".join(path.read_bytes() for path in sorted(SOURCE.parent.iterdir()))


def _load_or_compile(compiler: Sequence[str], library: Path) -> ctypes.CDLL:
    if library.exists():
        with contextlib.suppress(OSError):  # a damaged library is compiled again
            return ctypes.CDLL(str(library))
    _compile(compiler, library)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(library))
    # The home folder may be mounted noexec: load a copy from the temporary folder.
    with tempfile.TemporaryDirectory(prefix="commhooks-", ignore_cleanup_errors=True) as temporary:
        return ctypes.CDLL(shutil.copy(library, temporary))


def _compile(compiler: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        made = Path(temporary, library.name)
        command = [*compiler, "-o", str(made), str(SOURCE)]
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
    return device.type == "cpu" and dtype in _C_TYPES


def check_supported(device: torch.device, dtype: torch.dtype) -> None:
    """Raise HookConfigError unless the kernel supports this compute dtype (float32, float64) and this device (CPU)."""
    if not supports(device, dtype):
        raise HookConfigError(
            f"fused=True works on the CPU, and here are gradients in {str(dtype).removeprefix('torch.')} on {device}: "
            "leave out fused=True"
        )


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
