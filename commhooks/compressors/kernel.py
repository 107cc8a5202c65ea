"""The kernels of a compressor: implementations of the same computation, of which all ranks must use one.

Two kernels compute the same up to rounding. Every rank computes its own copy of the averaged gradient, so ranks with
different kernels would drift apart. The engine therefore asks every rank what it has (`Compressor.kernel_here`) and
chooses one for all (`engine/kernel_choice.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One implementation of an exchange's computation.

    Attributes:
        name: its name for users, in the log and in `stats()`.
        build: what tells apart kernels of the same name whose results differ in the last bits, for example because
            they were compiled for different processors. Ranks share a kernel if name and build are equal.
    """

    name: str
    build: str = ""


TORCH = Kernel("torch")
"""torch's operations: every machine has them."""


@dataclass(frozen=True)
class KernelHere:
    """The fastest kernel of this machine.

    Attributes:
        kernel: all ranks compute with it if all have it, otherwise with torch.
        missing: why a faster one is missing, and how to get it, as a sentence for users; "" if none is missed.
    """

    kernel: Kernel = TORCH
    missing: str = ""
