"""PowerSGD's buffers for one bucket layout on an accelerator, allocated once. They belong to one session and are never
saved."""

from collections.abc import Sequence

import torch

from commhooks.compressors.named_views import NamedViews
from commhooks.compressors.powersgd.matrix import Matrix, by_shape, complement, spans_of
from commhooks.compressors.powersgd.matrix_stack import MatrixStack
from commhooks.compressors.powersgd.message import Contents
from commhooks.compressors.powersgd.packed_factors import PackedFactors, new_packed
from commhooks.compressors.powersgd.workspace import WorkspaceSetup
from commhooks.gradients import precision
from commhooks.gradients.layout import BucketLayout


class DeviceWorkspace:
    """Buffers of one bucket layout, on its device.

    Args:
        matrices: the compressed matrices of the bucket.
        setup: see `WorkspaceSetup`.

    Attributes:
        matrices: in the order in which they are sent.
        stacks: the same matrices, grouped by shape.
        p, q: the factors of all matrices.
        slots: the parameters in the matrices.
        parts: of a bucket that is one matrix, the numbers of elements of each parameter and of the padding; None if
            every matrix is one parameter.
        largest: per parameter in the matrices the largest absolute value of its gradient.
        first, second: what is sent: P, the uncompressed gradients and the flags first, then Q.
        both: their buffers, one after the other.
        spans: `(start, stop)` of each matrix and of everything else in the bucket, in its order.
    """

    def __init__(self, layout: BucketLayout, matrices: Sequence[Matrix], setup: WorkspaceSetup) -> None:
        self.layout = layout
        self.draws = setup.draws
        self.dtype = precision.compute_dtype(layout.dtype)
        self.stacks: list[MatrixStack] = []
        self.matrices: list[Matrix] = []
        for group in by_shape(matrices):
            self.stacks.append(MatrixStack(group, len(self.matrices), self._new_delta(group, setup.stack_deltas)))
            self.matrices += group
        self.p, self.q = self._factors("P"), self._factors("Q")
        for stack in self.stacks:
            stack.p, stack.q = self._of_stack(self.p.flat, stack, "P"), self._of_stack(self.q.flat, stack, "Q")
        self.slots = [slot for x in self.matrices for slot in x.slots]
        self.parts: torch.Tensor | None = None
        whole = self.matrices[0]
        if len(whole.slots) > 1 or not whole.fills_bucket_span:
            padding = whole.n * whole.m - layout.numel
            self.parts = torch.tensor([*(slot.numel for slot in whole.slots), padding]).to(layout.device)
        self.largest = torch.zeros(len(self.slots), dtype=self.dtype, device=layout.device)
        compressed, beside = spans_of(self.matrices), spans_of(setup.messages.beside)
        plain = complement(sorted([*compressed, *beside]), layout.numel)
        self.spans = sorted([*compressed, *beside, *plain])
        self.place_of_matrix = [self.spans.index(span) for span in compressed]
        self.place_of_plain = [self.spans.index(span) for span in plain]
        beside_numel = sum(stop - start for start, stop in plain)
        first = Contents([(x.name, (x.rank, x.n)) for x in self.matrices], beside_numel, len(self.slots))
        second = Contents([(x.name, (x.rank, x.m)) for x in self.matrices])
        sizes = [setup.messages.numel(first), setup.messages.numel(second)]
        self.both = setup.messages.new_buffer(sum(sizes))
        parts = self.both.split(sizes)
        self.first, self.second = setup.messages.new(first, parts[0]), setup.messages.new(second, parts[1])
        self._residuals: NamedViews | None = None
        self._learned_q: NamedViews | None = None

    @property
    def largest_rank(self) -> int:
        return max(x.rank for x in self.matrices)

    @property
    def residuals(self) -> NamedViews:
        """The residuals of all matrices, 1-D; one flat entry per parameter. Allocated at first use."""
        if self._residuals is None:
            names, begin = [], 0
            for matrix in self.matrices:
                names += [(slot.name, begin + slot.offset - matrix.start, (slot.numel,)) for slot in matrix.slots]
                begin += matrix.n * matrix.m
            self._residuals = NamedViews(names, torch.zeros(begin, dtype=self.dtype, device=self.layout.device))
        return self._residuals

    def residuals_of_stacks(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Per stack a view `k x n x m` of all residuals."""
        pieces = whole.split([len(x) * x.n * x.m for x in self.stacks])
        return [piece.view(len(x), x.n, x.m) for piece, x in zip(pieces, self.stacks, strict=True)]

    @property
    def learned_q(self) -> NamedViews:
        """The Q of all matrices, as `PackedFactors`; one entry `r x m` per matrix. Allocated at first use."""
        if self._learned_q is None:
            names, begin = [], 0
            for x in self.matrices:
                names.append((x.name, begin, (x.rank, x.m)))
                begin += x.rank * x.m
            self._learned_q = NamedViews(names, new_packed(begin, self.dtype, self.layout.device))
        return self._learned_q

    def _new_delta(self, group: Sequence[Matrix], stack_deltas: bool) -> torch.Tensor | None:
        """Memory for the deltas of matrices of one shape, unless they are computed in the bucket itself."""
        in_bucket = self.layout.dtype == self.dtype and group[0].fills_bucket_span
        if in_bucket and not (stack_deltas and len(group) > 1):
            return None
        return torch.zeros(len(group), group[0].n, group[0].m, dtype=self.dtype, device=self.layout.device)

    def _factors(self, side: str) -> PackedFactors:
        shapes = [(x.rank, x.n if side == "P" else x.m) for x in self.matrices]
        refill = [self.draws.refill(x, side, self.dtype) for x in self.matrices]
        return PackedFactors(shapes, refill, self.dtype, self.layout.device)

    def _of_stack(self, flat: torch.Tensor, stack: MatrixStack, side: str) -> torch.Tensor:
        """The part of packed factors that belongs to a stack, `k x r x length`."""

        def numel(x: Matrix) -> int:
            return x.rank * (x.n if side == "P" else x.m)

        begin = sum(map(numel, self.matrices[: stack.first]))
        size = len(stack) * numel(stack.matrices[0])
        return flat[begin : begin + size].view(len(stack), stack.rank, -1)
