"""Matrices of one shape as 3-D tensors, so that one kernel on an accelerator multiplies all of them.

Not used on the CPU: it brings no speed there, and the bits of a product can depend on alignment, so every matrix is
allocated separately.
"""

from collections.abc import Sequence

import torch

from commhooks.compressors.powersgd.matrix import Matrix


class MatrixStack:
    """`k` matrices `n x m` of one rank: views of the bucket's factors and residuals, and deltas of their own unless
    these are views of the bucket.

    Args:
        matrices: of equal shape and rank, in the order in which they are sent.
        first: number of matrices in the stacks before this one.
        delta: a tensor `k x n x m` for the deltas, or None.

    Attributes:
        p: transposed P, `k x r x n`; set by `DeviceWorkspace`.
        q: transposed Q, `k x r x m`; set by `DeviceWorkspace`.
    """

    p: torch.Tensor
    q: torch.Tensor

    def __init__(self, matrices: Sequence[Matrix], first: int, delta: torch.Tensor | None) -> None:
        self.matrices = tuple(matrices)
        self.first = first
        one = self.matrices[0]
        self.n, self.m, self.rank = one.n, one.m, one.rank
        self.delta = delta

    def __len__(self) -> int:
        return len(self.matrices)

    @property
    def filled(self) -> int:
        """Number of elements of each matrix that come from the bucket; the rest is padding."""
        return self.matrices[0].stop - self.matrices[0].start

    @property
    def padded(self) -> bool:
        """True for batched PowerSGD only: one padded matrix, alone in its stack."""
        return not self.matrices[0].fills_bucket_span

    def blocks(self, gradients: Sequence[torch.Tensor]) -> list[tuple[slice, torch.Tensor]]:
        """The deltas as 3-D tensors, each with its slice of the stack: one tensor for all matrices, or one view of the
        bucket per matrix. `gradients`: of these matrices, 1-D views of the bucket."""
        if self.delta is not None:
            return [(slice(0, len(self)), self.delta)]
        return [(slice(i, i + 1), g.view(1, self.n, self.m)) for i, g in enumerate(gradients)]
