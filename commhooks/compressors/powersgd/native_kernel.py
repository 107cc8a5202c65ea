"""What tells this machine's build of PowerSGD's native kernel apart from those of other machines."""

import functools
import hashlib

from commhooks.compressors.native import library
from commhooks.compressors.native.fixed_numbers import fixed_numbers
from commhooks.compressors.powersgd import fused_codec
from commhooks.compressors.powersgd.fused_codec import FusedCodec


def build() -> str:
    """`Kernel.build` of this machine. Raises HookConfigError if the kernel cannot be loaded."""
    digest = hashlib.sha256(library.source_text(fused_codec.SOURCE))
    for dtype in library.C_TYPES:
        digest.update(results_of(fused_codec.load(dtype)))
    return digest.hexdigest()[:12]


@functools.cache
def results_of(kernel: FusedCodec) -> bytes:
    """What the kernel computes from fixed numbers.

    Two builds of one source differ in the last bits: the length of the processor's vectors determines the order of the
    sums, and the compiler decides which multiplications and additions it joins. Results show both, flags and versions
    do not.
    """
    results = []
    # Odd lengths, each size of a group of rows, and once several parts (64 rows), sums of Q (96 rows) and tiles of
    # columns (8,192): every loop of the kernel runs.
    shapes = ((37, 1061, 1), (37, 1061, 2), (37, 1061, 3), (37, 1061, 4), (101, 8209, 6))
    numbers = fixed_numbers(2 + max(n * m for n, m, _ in shapes), 0, kernel.dtype)
    for n, m, rank in shapes:
        delta, residual = (numbers[start : start + n * m].view(n, m).clone() for start in (1, 2))
        q, basis = kernel.orthonormal_rows(numbers[: rank * m].view(rank, m), None)[0], delta.new_empty(rank, n)
        kernel.add_and_project_p(delta, residual, 0.7, q, rank, out=basis)
        p, _ = kernel.unit_rows(basis)
        local = delta.new_empty(rank, m)
        kernel.add_and_project_q(delta, residual, 0.7, p, rank, out=local)
        kernel.split(delta, (p, local), (p, q), rank, residual)
        results += [q, basis, p, local, residual, delta]
    return b"".join(each.numpy().tobytes() for each in results)
