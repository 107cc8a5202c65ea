"""What a compressor with a native kernel and the option `fused` says to the engine: see `kernel.py`."""

import textwrap
from collections.abc import Callable

import torch

from commhooks.compressors.kernel import TORCH, Kernel, KernelsHere
from commhooks.compressors.native import library
from commhooks.errors import HookConfigError

NAME = "native"
_MESSAGE_LENGTH = 500


def kernels_here(device: torch.device, dtype: torch.dtype, fused: bool | None, build: Callable[[], str]) -> KernelsHere:
    """The native kernel and torch; with `fused=True` only the kernel, with False only torch. For devices and compute
    dtypes that kernels do not support, there is only torch, and nothing is missing.

    Args:
        build: loads the kernel, for all dtypes since a model may have several, and returns its `Kernel.build`. Raises
            HookConfigError if it cannot.
    """
    if fused is False or not library.supports(device, dtype):
        return KernelsHere()
    try:
        native = Kernel(NAME, build())
    except HookConfigError as error:
        reason = textwrap.shorten(str(error), _MESSAGE_LENGTH)
        return KernelsHere(missing=f"{reason} (it is several times faster than torch; fused=False does without it)")
    return KernelsHere((native,) if fused else (native, TORCH))


def check_here(
    device: torch.device, dtype: torch.dtype, fused: bool | None, load: Callable[[torch.dtype], object]
) -> None:
    """Raise HookConfigError if `fused` is True and kernels do not support this device and compute dtype, or if `load`,
    which loads the kernel, raises it."""
    if not fused:
        return
    library.check_supported(device, dtype)
    try:
        load(dtype)
    except HookConfigError as error:
        raise HookConfigError(f"fused=True: {error}. Without fused=True, torch would compute instead") from error


def computes_natively(kernel: Kernel, fused: bool | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a bucket with this compute dtype is computed by the native kernel, where `kernel` was chosen.

    Raises:
        HookConfigError: `fused` is True, and kernels do not support this device or dtype.
    """
    # A bucket may have another dtype than those for which the kernel was chosen (bare register_comm_hook).
    if fused:
        library.check_supported(device, dtype)
    return bool(fused) or (kernel.name == NAME and library.supports(device, dtype))
