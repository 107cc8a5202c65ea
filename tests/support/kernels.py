"""Select the kernel with which hooks compute on the CPU."""

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import torch

from commhooks.compressors.base import Compressor
from commhooks.engine.kernel_choice import KernelChoice, KernelSupport, choose
from commhooks.errors import HookConfigError


@contextlib.contextmanager
def computing_with(kernel: str) -> Iterator[None]:
    """Context manager: attach hooks with the kernel "native" (if it compiles here) or "torch"."""
    with mock.patch.dict(os.environ, {"COMMHOOKS_NATIVE": {"native": "1", "torch": "0"}[kernel]}):
        yield


def use_own_kernel(
    compressor: Compressor[Any], device: torch.device, dtypes: Collection[torch.dtype]
) -> KernelChoice:
    """Compute with the kernel that this machine prefers, if there are no other ranks. Raises
    HookConfigError if this machine cannot compress gradients of `dtypes` on `device`.
    """
    choice = choose([KernelSupport.of(compressor, device, dtypes)], 0, HookConfigError)
    compressor.native = choice.native
    return choice
