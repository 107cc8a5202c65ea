"""The switches that let float32 products be rounded (TF32, bfloat16), with one interface for all versions of torch."""

from typing import Any

import torch
import torch.backends.cuda
import torch.backends.mkldnn


class SwitchOfTheProcess:
    """`torch.set_float32_matmul_precision` with the interface of the newer switches: one for all libraries."""

    _NAMES = {"highest": "ieee", "high": "tf32", "medium": "bf16"}

    @property
    def fp32_precision(self) -> str:
        """As of the newer switches: "ieee" rounds nothing."""
        return self._NAMES[torch.get_float32_matmul_precision()]

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        """Takes "none" as well, which means torch's default, "ieee"."""
        old = {new: old for old, new in self._NAMES.items()}
        torch.set_float32_matmul_precision(old.get(value, "highest"))


def float32_switches() -> tuple[Any, ...]:
    """The switches of this torch; each has an attribute `fp32_precision`, which can be set.

    Newer than torch 2.8: one per library that multiplies float32 matrices, oneDNN on CPU, cuBLAS on CUDA. Each is read
    and restored separately; `torch.set_float32_matmul_precision` raises if a user has set these switches, too. torch
    2.8 has that one only.
    """
    if hasattr(torch.backends.mkldnn, "matmul"):
        return torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    return (SwitchOfTheProcess(),)
