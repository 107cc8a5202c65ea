"""Matrices of one shape in one 3-D tensor, so that one kernel on an accelerator processes all of them.

Not used on the CPU: it brings no speed there, and the bits of a product can depend on alignment, so every matrix is
allocated separately.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from commhooks.compressors.powersgd.matrix import Matrix

Fill = Callable[[int], torch.Tensor]


class NamedViews:
    """One tensor whose slices are the entries of a dict, so that entries kept by name can be processed together.

    Args:
        names: per entry its name, its offset in the flattened tensor and its shape.
        shape: shape of the whole tensor.
    """

    def __init__(
        self,
        names: Sequence[tuple[str, int, tuple[int, ...]]],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._whole = torch.zeros(shape, dtype=dtype, device=device)
        flat = self._whole.view(-1)
        self._views = {name: flat[begin : begin + torch.Size(own).numel()].view(own) for name, begin, own in names}

    def gather(self, entries: Mapping[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """Copy `entries` into the whole tensor and return it. A missing entry i becomes `fill(i)`, or zeros. Does not
        change the dict."""
        for i, (name, view) in enumerate(self._views.items()):
            known = entries.get(name)
            if known is view:
                continue
            if known is not None:
                if known.is_cuda:  # allocated on another stream, and may be freed before this stream has copied it
                    known.record_stream(torch.cuda.current_stream(known.device))
                view.copy_(known)
            elif fill is not None:
                view.copy_(fill(i))
            else:
                view.zero_()
        return self._whole

    def bind(self, entries: dict[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """As `gather`, and replace each entry of the dict by its slice of the whole tensor."""
        whole = self.gather(entries, fill)
        entries.update(self._views)
        return whole


class MatrixStack:
    """`k` matrices `n x m` of one rank: their factors, and their deltas unless these are views of the bucket.

    Args:
        matrices: of equal shape and rank, in the order in which they are sent.
        own_delta: allocate a tensor `k x n x m` for the deltas.
    """

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device, *, own_delta: bool
    ) -> None:
        self.matrices = tuple(matrices)
        first = self.matrices[0]
        k, self.n, self.m, self.rank = len(self.matrices), first.n, first.m, first.rank
        self.p = torch.zeros(k, self.rank, self.n, dtype=dtype, device=device)
        """Transposed P, `k x r x n`."""
        self.q = torch.zeros(k, self.rank, self.m, dtype=dtype, device=device)
        """Transposed Q, `k x r x m`."""
        self.delta = torch.zeros(k, self.n, self.m, dtype=dtype, device=device) if own_delta else None
        self._dtype = dtype
        self._device = device
        self._residuals: NamedViews | None = None
        self._learned_q: NamedViews | None = None

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

    def gradients(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of the matrices: 1-D views of the bucket."""
        return [buffer[x.start : x.stop] for x in self.matrices]

    def blocks(self, buffer: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        """The deltas as 3-D tensors, each with its slice of the stack: one tensor for all matrices, or one view of the
        bucket per matrix."""
        if self.delta is not None:
            return [(slice(0, len(self)), self.delta)]
        return [(slice(i, i + 1), g.view(1, self.n, self.m)) for i, g in enumerate(self.gradients(buffer))]

    @property
    def residuals(self) -> NamedViews:
        """The residuals, `k x n x m`; one flat entry per parameter. Allocated at first use."""
        if self._residuals is None:
            names = [
                (slot.name, i * self.n * self.m + slot.offset - matrix.start, (slot.numel,))
                for i, matrix in enumerate(self.matrices)
                for slot in matrix.slots
            ]
            self._residuals = NamedViews(names, (len(self), self.n, self.m), self._dtype, self._device)
        return self._residuals

    @property
    def learned_q(self) -> NamedViews:
        """The Q of each matrix, `k x r x m`; one entry per matrix name. Allocated at first use."""
        if self._learned_q is None:
            shape = (self.rank, self.m)
            names = [(x.name, i * self.rank * self.m, shape) for i, x in enumerate(self.matrices)]
            self._learned_q = NamedViews(names, (len(self), *shape), self._dtype, self._device)
        return self._learned_q
