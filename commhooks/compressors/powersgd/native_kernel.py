"""Whether this machine has PowerSGD's native kernel, and what tells its build apart from those of other machines."""

import functools
import hashlib
import textwrap

import torch

from commhooks.compressors.kernel import TORCH, Kernel, KernelsHere
from commhooks.compressors.powersgd import fused_codec
from commhooks.compressors.powersgd.fused_codec import FusedCodec
from commhooks.errors import HookConfigError

NAME = "native"
_MESSAGE_LENGTH = 500


def kernels_here(device: torch.device, dtype: torch.dtype, *, only: bool) -> KernelsHere:
    """The native kernel, compiled at its first use, and torch; with `only` not torch. For devices and compute dtypes
    that the kernel does not support, there is only torch, and nothing is missing."""
    if not fused_codec.supports(device, dtype):
        return KernelsHere()
    try:
        fused_codec.load(dtype)
        native = Kernel(NAME, build_of(fused_codec.load()))  # for both dtypes: a model may have both
    except HookConfigError as error:
        reason = textwrap.shorten(str(error), _MESSAGE_LENGTH)
        return KernelsHere(missing=f"{reason} (it is several times faster than torch; fused=False does without it)")
    return KernelsHere((native,) if only else (native, TORCH))


@functools.cache
def build_of(kernel: FusedCodec) -> str:
    """A hash of the kernel's source and of the bits that it computes from fixed numbers.

    Two builds of one source differ in the last bits: the length of the processor's vectors determines the order of the
    sums, and the compiler decides which multiplications and additions it joins. Results show both, flags and versions
    do not.
    """
    digest = hashlib.sha256(fused_codec.source_text())
    # Odd lengths, each size of a group of rows, and once several parts (64 rows), sums of Q (96 rows) and tiles of
    # columns (8,192): every loop of the kernel runs.
    for n, m, rank in ((37, 1061, 1), (37, 1061, 2), (37, 1061, 3), (37, 1061, 4), (149, 9001, 6)):
        delta, residual = _numbers(n, m, 1), _numbers(n, m, 2)
        q, basis = kernel.orthonormal_rows(_numbers(rank, m, 3), None)[0], torch.empty(rank, n)
        kernel.add_and_project(delta, residual, 0.7, q, rank, out=basis)
        p, _ = kernel.unit_rows(basis)
        local = torch.empty(rank, m)
        kernel.project_q(delta, p, rank, out=local)
        kernel.split(delta, (p, local), (p, q), rank, residual)
        for result in (q, basis, p, local, residual, delta):
            digest.update(result.numpy().tobytes())
    return digest.hexdigest()[:12]


def _numbers(rows: int, columns: int, start: int) -> torch.Tensor:
    """Numbers between -0.5 and 0.5, the same bits on every machine: float64 products and rounding are exact rules."""
    counted = torch.arange(start, start + rows * columns, dtype=torch.float64)
    return ((counted * 0.6180339887498949).frac() - 0.5).float().view(rows, columns)
