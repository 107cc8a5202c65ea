"""The buffers of `FusedExchange`, and the tables for the native kernel."""

import itertools
from collections.abc import Sequence

import torch

from commhooks.compressors.native.tables import address
from commhooks.compressors.powersgd import fused_codec
from commhooks.compressors.powersgd.kernel_tables import FactorTable, MatrixTable
from commhooks.compressors.powersgd.matrix import Matrix
from commhooks.compressors.powersgd.workspace import Workspace, WorkspaceSetup
from commhooks.gradients.layout import BucketLayout


class FusedWorkspace(Workspace):
    """As `Workspace`, for matrices of one parameter each. The factors lie one after another, as they are sent.

    Attributes:
        kernel: the native kernel for the compute dtype.
        all_p, all_q: all factors, 1-D; `p` and `q` are views of them.
        table: the matrices, with the places of `p` and `q`.
        unit_q, basis_p: for scaling the rows of Q to norm 1 and for orthonormalising P, into `q` and `p`.
        equal_ranks: slices of `all_q` whose factors have one rank, and that rank.
    """

    def __init__(self, layout: BucketLayout, matrices: list[Matrix], setup: WorkspaceSetup) -> None:
        super().__init__(layout, matrices, setup)
        self.kernel = fused_codec.load(self.dtype)
        self.all_p, self.p = self._packed([(x.rank, x.n) for x in matrices])
        self.all_q, self.q = self._packed([(x.rank, x.m) for x in matrices])
        self.table = MatrixTable([[x.n, x.m, x.rank] for x in matrices], self.dtype)
        for field, tensors in (("p", self.p), ("q", self.q), ("mean_p", self.p)):
            self.table.point(field, tensors)
        self.unit_q = FactorTable([[x.rank, x.m] for x in matrices], self.dtype)
        self.unit_q.point("to", self.q)
        self.basis_p = FactorTable([[x.rank, x.n] for x in matrices], self.dtype)
        self.basis_p.point("to", self.p)
        self.equal_ranks: list[tuple[slice, int]] = []
        begin = 0
        for rank, group in itertools.groupby(matrices, key=lambda x: x.rank):
            end = begin + sum(rank * x.m for x in group)
            self.equal_ranks.append((slice(begin, end), rank))
            begin = end
        self._offsets = torch.tensor([x.start * self.dtype.itemsize for x in matrices])

    def point_to_deltas(self, bucket: torch.Tensor) -> None:
        """Write into `table` where the deltas lie: in `bucket`, the bucket's buffer, unless the dtypes differ."""
        if self.layout.dtype == self.dtype:
            self.table.point_from("delta", address(bucket, self.dtype, self.layout.numel), self._offsets)
        else:
            self.table.point("delta", self.delta)

    def _packed(self, shapes: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A 1-D tensor for factors of these shapes, and a view of it per factor."""
        numels = [r * length for r, length in shapes]
        flat = torch.zeros(sum(numels), dtype=self.dtype)
        return flat, [piece.view(shape) for piece, shape in zip(flat.split(numels), shapes, strict=True)]
