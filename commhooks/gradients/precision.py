"""The arithmetic in which hooks compute, whatever the user's switches say.

A hook runs inside `backward`: grad mode may be on (`create_graph=True`), autocast may be active, and TF32 or bf16
products may be allowed for the model. Error feedback needs none of that: a product rounded to 10 bits loses what the
residual is meant to keep.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.backends.cuda
import torch.backends.mkldnn

from commhooks.errors import HookConfigError

# One switch per library that multiplies float32 matrices: oneDNN on CPU, cuBLAS on CUDA. Read and restored one by one;
# the older `torch.set_float32_matmul_precision` raises once a user has mixed it with these.
_PRECISION_SWITCHES = (
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    torch.backends.cuda.matmul,
)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_host_readable(device: torch.device) -> bool:
    """Whether Python can read a number of a tensor on `device` without waiting for an accelerator. Where it cannot,
    masks on the device decide."""
    return device.type == "cpu"


def check_one_device(devices: Iterable[torch.device], what: str) -> None:
    """Buckets of several devices would have to wait for each other: a step is committed as a whole, or not at all.

    Args:
        what: the compression that needs it, for the message.

    Raises:
        HookConfigError: there are several.
    """
    found = sorted({str(device) for device in devices})
    if len(found) > 1:
        raise HookConfigError(
            f"the parameters of this model are on {', '.join(found)}; {what} works where those of one process are on "
            "one device. Use one device per process, or the hook 'fp16_compress' or 'bf16_compress'"
        )


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Run the body without grad mode and autocast, float32 products in full float32."""
    saved = []
    for switch in _PRECISION_SWITCHES:
        precision = switch.fp32_precision
        if precision not in ("ieee", "none"):
            saved.append((switch, precision))
            switch.fp32_precision = "ieee"
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        for switch, precision in saved:
            # "none" takes the value of the switch above it; write one of its own only where there was one.
            switch.fp32_precision = "none"
            if switch.fp32_precision != precision:
                switch.fp32_precision = precision
