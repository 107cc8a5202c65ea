"""What tells this machine's build of PowerSGD's native kernel apart from those of other machines."""

import functools
import hashlib

import torch

from commhooks.compressors.native import library
from commhooks.compressors.native.fixed_numbers import fixed_numbers
from commhooks.compressors.powersgd import fused_codec
from commhooks.compressors.powersgd.fused_codec import FusedCodec


def build() -> str:
    """`Kernel.build` of this machine. Raises HookConfigError if the kernel cannot be loaded."""
    fused_codec.load(torch.float64)
    return build_of(fused_codec.load())


@functools.cache
def build_of(kernel: FusedCodec) -> str:
    """A hash of the kernel's source and of the bits that it computes from fixed numbers.

    Two builds of one source differ in the last bits: the length of the processor's vectors determines the order of the
    sums, and the compiler decides which multiplications and additions it joins. Results show both, flags and versions
    do not.
    """
    digest = hashlib.sha256(library.source_text(fused_codec.SOURCE))
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
    return fixed_numbers(rows * columns, start).view(rows, columns)
