"""A compressor with a native kernel: what it says to the engine; see `kernel.py`."""

import textwrap
from typing import Any

import torch

from commhooks.compressors.base import Compressor
from commhooks.compressors.kernel import Kernel, KernelHere
from commhooks.compressors.native import library
from commhooks.errors import HookConfigError
from commhooks.gradients.precision import compute_dtype
from commhooks.options import ConfigT

NAME = "native"
_MESSAGE_LENGTH = 500


class NativelyComputed(Compressor[ConfigT]):
    """
    Attributes:
        native: the module of the kernel. `build()` loads it for all compute dtypes, since a model may have several, and
            returns its `Kernel.build`; it raises HookConfigError if it cannot.
    """

    native: Any

    def kernel_here(self, device: torch.device, dtype: torch.dtype) -> KernelHere:
        """The native kernel. Nothing is missing where it is switched off or does not support the device or dtype."""
        if library.is_switched_off() or not library.supports(device, compute_dtype(dtype)):
            return KernelHere()
        try:
            return KernelHere(Kernel(NAME, self.native.build()))
        except HookConfigError as error:
            reason = textwrap.shorten(str(error), _MESSAGE_LENGTH)
            return KernelHere(
                missing=f"{reason} (it is several times faster than torch; {library.SWITCH}=0 does without it)"
            )

    def computes_natively(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a bucket of `dtype` is computed by the native kernel, now that `kernel` is chosen."""
        # A bucket may have another dtype than those for which the kernel was chosen (bare register_comm_hook).
        return self.kernel.name == NAME and library.supports(device, compute_dtype(dtype))
