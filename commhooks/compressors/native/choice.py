"""A compressor with a native kernel and the option `fused`: what it says to the engine; see `kernel.py`."""

import textwrap
from typing import Any

import torch

from commhooks.compressors.base import Compressor
from commhooks.compressors.hook_config import ConfigT
from commhooks.compressors.kernel import TORCH, Kernel, KernelsHere
from commhooks.compressors.native import library
from commhooks.errors import HookConfigError
from commhooks.gradients.precision import compute_dtype

NAME = "native"
_MESSAGE_LENGTH = 500


class NativelyComputed(Compressor[ConfigT]):
    """
    Attributes:
        native: the module of the kernel. `load(dtype)` loads it for a compute dtype; `build()` loads it for all, since
            a model may have several, and returns its `Kernel.build`. Both raise HookConfigError if they cannot.
    """

    native: Any

    @property
    def fused(self) -> bool | None:
        """The option."""
        config: Any = self.config
        fused: bool | None = config.fused
        return fused

    def kernels_here(self, device: torch.device, dtype: torch.dtype) -> KernelsHere:
        """The native kernel and torch; with `fused=True` only the kernel, with False only torch. For devices and
        compute dtypes that kernels do not support, there is only torch, and nothing is missing."""
        if self.fused is False or not library.supports(device, compute_dtype(dtype)):
            return KernelsHere()
        try:
            native = Kernel(NAME, self.native.build())
        except HookConfigError as error:
            reason = textwrap.shorten(str(error), _MESSAGE_LENGTH)
            return KernelsHere(missing=f"{reason} (it is several times faster than torch; fused=False does without it)")
        return KernelsHere((native,) if self.fused else (native, TORCH))

    def check_here(self, device: torch.device, dtype: torch.dtype) -> None:
        if not self.fused:
            return
        library.check_supported(device, compute_dtype(dtype))
        try:
            self.native.load(compute_dtype(dtype))
        except HookConfigError as error:
            raise HookConfigError(f"fused=True: {error}. Without fused=True, torch would compute instead") from error

    def computes_natively(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a bucket of `dtype` is computed by the native kernel, now that `kernel` is chosen.

        Raises:
            HookConfigError: `fused` is True, and kernels do not support this device or dtype.
        """
        # A bucket may have another dtype than those for which the kernel was chosen (bare register_comm_hook).
        if self.fused:
            library.check_supported(device, compute_dtype(dtype))
            return True
        return self.kernel.name == NAME and library.supports(device, compute_dtype(dtype))
