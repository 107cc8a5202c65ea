"""Where each parameter lies in a row, and what of it is compressed.

A *row* is what one rank contributes to a unit of FSDP2: this rank's shard of every parameter of the
unit, one after another, each padded to the size of the largest shard. The all-gather of W ranks
writes `W x numel` elements, a row from each rank. The reduce-scatter reads `W x numel` elements, a
row for each rank.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from commhooks.compressors.quantized.mean import BlockCode
from commhooks.gradients.names import matching
from commhooks.gradients.precision import compute_dtype, dtype_name

COMPRESSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class UnitParameter:
    """Describes a parameter of a unit.

    Attributes:
        names: its name, and further names if it is tied.
        shape: of the whole parameter.
        dtype: of its shard, which the optimizer changes.
        gathered_dtype: `param_dtype` of the unit's `MixedPrecisionPolicy`, or `dtype`.
        reduced_dtype: the dtype in which its gradient is reduced.
        numel: of this rank's padded shard: its elements in a row.
        trained: whether it requires a gradient.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    gathered_dtype: torch.dtype
    reduced_dtype: torch.dtype
    numel: int
    trained: bool = True

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Piece:
    """Describes the elements of one parameter in a row. `exact`: why they keep their dtype; ""
    if they are compressed.
    """

    name: str
    start: int
    numel: int
    exact: str = ""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the elements in a row, or in each of several rows."""
        return rows[..., self.start : self.start + self.numel]


@dataclass(frozen=True)
class RowLayout:
    """`form`: "int8" or "bf16". `dtype`: of the row. If nothing is compressed, FSDP2 sends it."""

    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    form: str
    code: BlockCode

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    @property
    def compressed(self) -> list[Piece]:
        return [piece for piece in self.pieces if not piece.exact]

    @property
    def exact(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.exact and piece.numel]

    def sent_bytes(self, piece: Piece) -> int:
        if piece.exact:
            return piece.numel * self.dtype.itemsize
        return compressed_bytes(piece.numel, self.dtype, self.form, self.code)


def compressed_bytes(numel: int, dtype: torch.dtype, form: str, code: BlockCode) -> int:
    if form == "bf16":
        return numel * torch.bfloat16.itemsize
    return code.blocks_of(numel) * (code.block_bytes + compute_dtype(dtype).itemsize)


def row_layout(
    parameters: Sequence[UnitParameter],
    dtypes: Sequence[torch.dtype],
    form: str | None,
    code: BlockCode,
    exclude: Sequence[str],
) -> RowLayout | None:
    """Lay out a row of these parameters. `dtypes`: of each of them in the row. Returns None if
    they cannot be compressed.
    """
    if form is None or len(set(dtypes)) != 1:  # FSDP2 packs several dtypes as bytes
        return None
    starts = itertools.accumulate((parameter.numel for parameter in parameters), initial=0)
    pieces = []
    for parameter, start in zip(parameters, starts, strict=False):
        exact = why_exact(parameter, dtypes[0], form, code, exclude)
        pieces.append(Piece(parameter.name, start, parameter.numel, exact))
    return RowLayout(tuple(pieces), dtypes[0], form, code)


def why_exact(
    parameter: UnitParameter,
    dtype: torch.dtype,
    form: str,
    code: BlockCode,
    exclude: Sequence[str],
) -> str:
    """Return why the elements of a parameter keep their dtype; "" if they are compressed."""
    if len(parameter.shape) < 2:
        return "vector" if parameter.shape else "scalar"
    if dtype not in COMPRESSED_DTYPES:
        return dtype_name(dtype)
    glob = matching(parameter.names, exclude)
    if glob is not None:
        return f"excluded by {glob!r}"
    if compressed_bytes(parameter.numel, dtype, form, code) >= parameter.numel * dtype.itemsize:
        return "too small for a block" if form == "int8" else f"{dtype_name(dtype)} already"
    return ""
