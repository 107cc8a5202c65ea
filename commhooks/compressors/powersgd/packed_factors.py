"""One factor of every matrix of a bucket, so that a few kernels process all of them on an accelerator.

Packed, the factors lie one after another in a 1-D tensor, `r x length` each, as they are sent. Work on rows, such as
orthonormalising them, needs tensors of one shape: there they are padded with zeros, which change no product of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commhooks.compressors.powersgd import codec

_WASTE, _SMALL = 4, 2**14
"""Factors share a padded tensor if its rows have together at most `_WASTE` times their length, or at most `_SMALL`
elements. Independent of r, so that the number of kernels is, too."""


class PackedFactors:
    """P or Q of all matrices, transposed.

    Args:
        shapes: `(r, length)` of each matrix.
        refill: per matrix random rows, `r x length`, on the CPU: they replace zero and dependent rows.

    Attributes:
        numel: number of elements of all factors.
        flat: the factors, 1-D, in the compute dtype.
        matrix_of: per element of `flat` the number of its matrix.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        refill: Sequence[torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        counts = [rank * length for rank, length in shapes]
        self.numel = sum(counts)
        self._memory = new_packed(self.numel, dtype, device)
        self.flat = self._memory[:-1]
        self.matrix_of = torch.arange(len(shapes)).repeat_interleave(torch.tensor(counts)).int().to(device)
        self._groups = _grouped(shapes)
        self._sizes = [torch.Size(group.shape).numel() for group in self._groups]
        # In an empty place of a padded tensor stands the last element of the packed one, which is always zero.
        to_padded = torch.full((sum(self._sizes),), self.numel, dtype=torch.int32)
        to_packed = torch.empty(self.numel, dtype=torch.int32)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        places = torch.arange(sum(self._sizes), dtype=torch.int32).split(self._sizes)
        for group, here, block in zip(self._groups, places, to_padded.split(self._sizes), strict=True):
            for row, i in enumerate(group.members):
                rank, length = shapes[i]
                own = slice(starts[i], starts[i] + counts[i])
                packed = torch.arange(own.start, own.stop, dtype=torch.int32)
                block.view(group.shape)[row, :rank, :length] = packed.view(rank, length)
                to_packed[own] = here.view(group.shape)[row, :rank, :length].flatten()
        self._alike = len(set(shapes)) == 1
        """All factors have one shape: padded and packed are the same."""
        self._to_padded, self._to_packed = to_padded.to(device), to_packed.to(device)
        self._members = [torch.tensor(group.members, device=device) for group in self._groups]
        given = torch.cat([each.flatten() for each in refill] + [torch.zeros(1, dtype=refill[0].dtype)]).to(device)
        self._refill = [codec.unit_stack(rows)[0].to(dtype) for rows in self._padded(given)]
        self._result = self.flat if self._alike else torch.zeros(sum(self._sizes), dtype=dtype, device=device)
        self._results = self._views(self._result)

    def unit_rows(self, packed: torch.Tensor) -> None:
        """Write the rows of `packed` (from `new_packed`), scaled to norm 1, into `flat`. Zero rows become random
        ones."""
        for rows, refill, out in zip(self._padded(packed), self._refill, self._results, strict=True):
            unit, missing = codec.unit_stack(rows)
            torch.addcmul(unit, refill, missing, out=out)
        self._pack()

    def orthonormalise(self, arrived: torch.Tensor, keep: torch.Tensor) -> None:
        """Write orthonormal bases of the rows of `arrived` (1-D, `numel` elements) into `flat`; see
        `codec.orthonormal_stack`. Where `keep` (bool, one per matrix) is False the basis becomes zero."""
        self.flat.copy_(arrived)
        groups = zip(self._padded(self._memory), self._refill, self._members, self._results, strict=True)
        for rows, refill, members, out in groups:
            kept = keep if self._alike else keep.index_select(0, members)
            torch.mul(codec.orthonormal_stack(rows, refill), kept.view(-1, 1, 1), out=out)
        self._pack()

    def _padded(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Per group `k x r x length`."""
        return self._views(packed[:-1] if self._alike else packed.index_select(0, self._to_padded))

    def _views(self, padded: torch.Tensor) -> list[torch.Tensor]:
        """Per group a view `k x r x length` of a 1-D tensor that holds all groups."""
        return [piece.view(x.shape) for piece, x in zip(padded.split(self._sizes), self._groups, strict=True)]

    def _pack(self) -> None:
        """Copy the results into `flat`."""
        if not self._alike:
            torch.index_select(self._result, 0, self._to_packed, out=self.flat)


def new_packed(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for packed factors: `numel` elements, and one more that stays zero."""
    return torch.zeros(numel + 1, dtype=dtype, device=device)


@dataclass(frozen=True)
class _Group:
    """Matrices whose factors share one padded tensor."""

    members: list[int]
    shape: tuple[int, int, int]
    """`k x r x length` of the padded tensor, with the largest r and length."""


def _grouped(shapes: Sequence[tuple[int, int]]) -> list[_Group]:
    """Group factors of similar length, in the order of their lengths."""
    groups: list[_Group] = []
    filled = 0
    for i in sorted(range(len(shapes)), key=lambda i: (shapes[i][1], i)):
        rank, length = shapes[i]
        members, k, widest = (groups[-1].members, *groups[-1].shape[:2]) if groups else ([], 0, 0)
        if groups and (k + 1) * length <= max(_WASTE * (filled + length), _SMALL):
            groups[-1] = _Group([*members, i], (k + 1, max(widest, rank), length))
            filled += length
        else:
            groups.append(_Group([i], (1, rank, length)))
            filled = length
    return groups
