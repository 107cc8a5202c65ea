"""Which kernel computes the codes of a device: C on the CPU, Triton on CUDA, else torch."""

from collections.abc import Iterable

import torch

from commhooks.compressors.native import library
from commhooks.compressors.quantized.kernels import results_of
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.errors import HookConfigError
from commhooks.gradients import precision
from commhooks.sharded.blocks import NativeBlocks, NewBlocks


def check_native(
    device: torch.device, dtypes: Iterable[torch.dtype], code: BlockCode
) -> tuple[bool, str]:
    """Return whether there is a native kernel for rows of all `dtypes`, and if it should be there,
    but is not, the reason and the remedy. The ranks need not agree: all kernels compute the same
    bits.
    """
    try:
        if precision.is_host_readable(device):
            return library.build(device, results_of) != "", ""
        if device.type != "cuda" or library.is_switched_off():
            return False, ""
        from commhooks.sharded.triton_kernel import build  # Triton may be missing
    except ImportError as error:
        return False, (
            f"the native kernel for {device} needs Triton, which cannot be imported ({error}):"
            f" install it, or turn the kernel off by {library.SWITCH}=0"
        )
    except HookConfigError as error:
        return False, str(error)
    try:
        for dtype in dtypes:
            build(device, dtype, code)
    except HookConfigError as error:
        return False, str(error)
    return True, ""


def native_blocks(device: torch.device) -> NewBlocks:
    if precision.is_host_readable(device):
        return NativeBlocks
    from commhooks.sharded.triton_kernel import TritonBlocks

    return TritonBlocks
