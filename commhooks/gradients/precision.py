"""Hooks compute in full precision, independent of the user's settings.

A hook runs inside `backward`: grad mode may be on (`create_graph=True`), autocast may be active, and TF32 or bf16
products may be allowed for the model. Hooks must avoid all of these: rounding a product to 10 bits loses the part that
error feedback stores in the residual.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from commhooks.errors import HookConfigError
from commhooks.gradients.float32_switches import float32_switches

_PRECISION_SWITCHES = float32_switches()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which hooks compute: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_host_readable(device: torch.device) -> bool:
    """Whether Python can read a tensor on `device` without synchronising with an accelerator. If not, hooks use masks
    on the device instead of branches."""
    return device.type == "cpu"


def has_streams(device: torch.device) -> bool:
    """Whether work on `device` is queued on CUDA streams."""
    return device.type == "cuda"


def check_one_device(devices: Iterable[torch.device], what: str) -> None:
    """Check that all buckets are on one device: a step is committed for all buckets together, and buckets on several
    devices would have to wait for each other.

    Args:
        what: name of the compression, for the message.

    Raises:
        HookConfigError: there are several devices.
    """
    found = sorted({str(device) for device in devices})
    if len(found) > 1:
        raise HookConfigError(
            f"the parameters of this model are on {', '.join(found)}; {what} works where those of one process are on "
            "one device. Use one device per process, or the hook 'fp16_compress' or 'bf16_compress'"
        )


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Run the body without grad mode and autocast, with float32 products in full float32 precision."""
    _switch_off()
    try:
        has_autocast = torch.amp.is_autocast_available(device.type)
        with torch.no_grad(), torch.autocast(device.type, enabled=False) if has_autocast else contextlib.nullcontext():
            yield
    finally:
        _switch_on()


# The switches are those of the process, and autograd has a thread per GPU: the last thread to leave restores them.
_lock = threading.RLock()
_inside = 0
_before: list[tuple[Any, str]] = []


def _switch_off() -> None:
    global _inside
    with _lock:
        _inside += 1
        for switch in _PRECISION_SWITCHES if _inside == 1 else ():
            precision = switch.fp32_precision
            if precision not in ("ieee", "none"):
                _before.append((switch, precision))
                switch.fp32_precision = "ieee"


def _switch_on() -> None:
    global _inside
    with _lock:
        _inside -= 1
        while _inside == 0 and _before:
            switch, precision = _before.pop()
            # "none" inherits from the parent switch; set an explicit value only if there was one before.
            switch.fp32_precision = "none"
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision
