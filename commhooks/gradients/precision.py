"""Run the arithmetic of hooks in full precision, whatever the user's settings are.

A hook runs inside `backward`: the caller's modes may be on (`modes.py`), and TF32 or bf16 products
may be allowed. Rounding a product to 10 bits would lose what error feedback stores in the residual.
"""

import contextlib
import platform
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.backends.cuda
import torch.backends.mkldnn

from commhooks.errors import HookConfigError
from commhooks.gradients.modes import plain_mode
from commhooks.gradients.torch_private import sparse_indices, sparse_values


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which hooks compute: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_host_readable(device: torch.device) -> bool:
    """Return whether Python can read tensors on `device` without synchronising.

    If not, hooks use masks, not branches.
    """
    return device.type == "cpu"


def has_streams(device: torch.device) -> bool:
    """Return whether work on `device` is queued on streams, as on CUDA and XPU.

    MPS has a single queue.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and device.type == accelerator.type != "mps"


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def keep_for_current_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of `tensors`, allocated on another stream, for work of the current stream.

    Once they are freed, it is not reused before the current stream has finished what was queued on
    it by then.
    """
    for tensor in tensors:
        if has_streams(tensor.device):
            parts = [tensor]
            if tensor.is_sparse:
                parts = [sparse_indices(tensor), sparse_values(tensor)]
            for part in parts:
                part.record_stream(torch.accelerator.current_stream(tensor.device))


def check_one_device(devices: Iterable[torch.device], what: str) -> None:
    """Raise HookConfigError, about the compressor `what`, if there are several devices.

    All buckets are committed together, and buckets on several devices would have to wait for each
    other.
    """
    names = sorted({str(device) for device in devices})
    if len(names) > 1:
        raise HookConfigError(
            f"the parameters of this model are on {', '.join(names)}; {what} needs all parameters"
            " of a process on one device. Use one device per process, or the hook 'fp16_compress'"
            " or 'bf16_compress'"
        )


# ---- the switches that let float32 products be rounded (TF32, bfloat16) --------------------------


class GlobalSwitch:
    _NAMES = {"highest": "ieee", "high": "tf32", "medium": "bf16"}

    @property
    def fp32_precision(self) -> str:
        return self._NAMES[torch.get_float32_matmul_precision()]

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        old = {new: old for old, new in self._NAMES.items()}
        torch.set_float32_matmul_precision(old.get(value, "highest"))  # "none" is torch's default


# torch newer than 2.8 has a switch per library that multiplies float32 matrices: oneDNN on the CPU,
# cuBLAS on CUDA. Each is read and restored separately. `torch.set_float32_matmul_precision`, the
# only switch in 2.8, raises if a user has set these.
_PRECISION_SWITCHES: tuple[Any, ...] = (
    (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    if hasattr(torch.backends.mkldnn, "matmul")
    else (GlobalSwitch(),)
)


# The switches are global, and autograd has a thread per GPU: the last thread to leave restores
# them.
_lock = threading.RLock()
_inside = 0
_before: list[tuple[Any, str]] = []


@contextlib.contextmanager
def full_precision(*, products: bool = True) -> Iterator[None]:
    """Run the body in `plain_mode`, and with float32 products in full precision.

    Pass `products=False` for a body without products: then the global switches stay as they are,
    because another thread may be training.
    """
    global _inside
    with _lock:
        _inside += products
        for switch in _PRECISION_SWITCHES if products and _inside == 1 else ():
            precision = switch.fp32_precision
            if precision not in ("ieee", "none"):
                _before.append((switch, precision))
                switch.fp32_precision = "ieee"
    try:
        with plain_mode():
            yield
    finally:
        with _lock:
            _inside -= products
            while _inside == 0 and _before:
                switch, precision = _before.pop()
                # "none" inherits from the parent switch. Set an explicit value only if there was
                # one before.
                switch.fp32_precision = "none"
                if switch.fp32_precision != precision:
                    switch.fp32_precision = precision


# ---- what the last bits depend on ----------------------------------------------------------------


def arithmetic_of(device: torch.device) -> str:
    """Describe what the order of sums in matrix products depends on.

    For example "torch 2.13.0+cpu, AMD EPYC 7763 64-Core Processor, AVX2, 8 threads". Machines with
    equal descriptions compute equal bits.
    """
    parts = [f"torch {torch.__version__}"]
    if device.type == "cpu":
        threads = torch.get_num_threads()
        parts += [
            _processor(),
            torch.backends.cpu.get_cpu_capability(),
            f"{threads} thread{'s' * (threads > 1)}",
        ]
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        parts += [torch.cuda.get_device_name(device), f"capability {major}.{minor}"]
    else:
        parts += [device.type]
    return ", ".join(parts)


def processor_lines(*beginnings: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(beginnings)]


def _processor() -> str:
    names = (line.partition(":")[2].strip() for line in processor_lines("model name"))
    return next(names, "") or platform.processor() or platform.machine()
