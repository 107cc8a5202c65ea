"""Whether this machine has a C compiler that works, which the native kernels need; and what they are, compiled once."""

import pytest
import torch

from commhooks.compressors.powersgd import fused_codec
from commhooks.compressors.quantized import native_blocks
from commhooks.errors import HookConfigError


def _compiled() -> bool:
    """Compile those that the cache does not hold. False: there is no compiler that works."""
    try:
        for each in (fused_codec, native_blocks):
            for dtype in (torch.float32, torch.float64):
                each.load(dtype)
    except HookConfigError:
        return False
    return True


HAS_COMPILER = _compiled()
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C compiler")
