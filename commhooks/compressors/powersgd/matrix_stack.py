"""Matrices of one shape in one 3-D tensor: on an accelerator one kernel then serves all of them.

On the CPU every matrix has memory of its own instead, aligned, because the bits of a product can depend on where it
lies; there is nothing to gain there.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from commhooks.compressors.powersgd.matrix import Matrix

Fill = Callable[[int], torch.Tensor]


class NamedViews:
    """A tensor of which the entries of a dict are slices, so that what is kept by name can be worked on as a whole.

    Args:
        names: one per entry, with where it lies in the flattened tensor and its shape.
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
        """The whole, equal to `entries` now; what is not there is `fill(its number)`, or zeros. The dict stays as it
        is."""
        for i, (name, view) in enumerate(self._views.items()):
            known = entries.get(name)
            if known is view:
                continue
            if known is not None:
                if known.is_cuda:  # made on another stream, and perhaps dropped before this one has copied it
                    known.record_stream(torch.cuda.current_stream(known.device))
                view.copy_(known)
            elif fill is not None:
                view.copy_(fill(i))
            else:
                view.zero_()
        return self._whole

    def bind(self, entries: dict[str, torch.Tensor], fill: Fill | None = None) -> torch.Tensor:
        """The whole, after `gather`, and from now on each entry is a slice of it."""
        whole = self.gather(entries, fill)
        entries.update(self._views)
        return whole


class MatrixStack:
    """`k` matrices `n x m` of one rank: their factors, and their deltas where these do not live in the bucket.

    Args:
        matrices: of equal shape and rank, in their order in the packed buffer.
        own_delta: give the deltas memory of their own, `k x n x m`.
    """

    def __init__(
        self, matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device, *, own_delta: bool
    ) -> None:
        self.matrices = tuple(matrices)
        first = self.matrices[0]
        k, self.n, self.m, self.rank = len(self.matrices), first.n, first.m, first.rank
        self.p = torch.zeros(k, self.rank, self.n, dtype=dtype, device=device)
        """Transposed P."""
        self.q = torch.zeros(k, self.rank, self.m, dtype=dtype, device=device)
        """Transposed Q."""
        self.delta = torch.zeros(k, self.n, self.m, dtype=dtype, device=device) if own_delta else None
        self._dtype = dtype
        self._device = device
        self._residuals: NamedViews | None = None
        self._learned_q: NamedViews | None = None

    def __len__(self) -> int:
        return len(self.matrices)

    @property
    def filled(self) -> int:
        """How many numbers of each matrix are of the bucket; what is left is padding."""
        return self.matrices[0].stop - self.matrices[0].start

    @property
    def padded(self) -> bool:
        """True for batched PowerSGD only: one padded matrix, alone in its stack."""
        return not self.matrices[0].fills_bucket_span

    def gradients(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where the matrices lie in the bucket, each 1-D."""
        return [buffer[x.start : x.stop] for x in self.matrices]

    def blocks(self, buffer: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
        """The deltas as 3-D tensors, each with its place in the stack: all in one, or one by one in the bucket."""
        if self.delta is not None:
            return [(slice(0, len(self)), self.delta)]
        return [(slice(i, i + 1), g.view(1, self.n, self.m)) for i, g in enumerate(self.gradients(buffer))]

    @property
    def residuals(self) -> NamedViews:
        """`k x n x m`; the entries are the parameters' own, flat. Made when it is first needed."""
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
        """`k x r x m`: the Q of each matrix, kept by the matrix's name. Made when it is first needed."""
        if self._learned_q is None:
            shape = (self.rank, self.m)
            names = [(x.name, i * self.rank * self.m, shape) for i, x in enumerate(self.matrices)]
            self._learned_q = NamedViews(names, (len(self), *shape), self._dtype, self._device)
        return self._learned_q
