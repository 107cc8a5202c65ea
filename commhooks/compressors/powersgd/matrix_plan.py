"""Which gradients PowerSGD compresses, at which rank, and the reasons for the others."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commhooks.comm.collectives import agreement_key
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.compressors.unit_plan import MemoryPlan, ParameterInfo, UnitPlan, real_itemsize
from commhooks.gradients.layout import matrix_shape
from commhooks.gradients.precision import compute_dtype


@dataclass(frozen=True)
class MatrixPlan(UnitPlan):
    """A gradient as an `n x m` matrix compressed at `rank`, or uncompressed with a reason."""

    n: int = 0
    m: int = 0
    rank: int = 0

    columns: ClassVar[tuple[str, ...]] = ("n x m", "rank")

    @property
    def numel_sent(self) -> int:
        """Elements of both factors, or of the gradient."""
        return (self.n + self.m) * self.rank if self.compressed else self.numel

    @property
    def cells(self) -> tuple[str, ...]:
        return f"{self.n} x {self.m}", str(self.rank)

    @property
    def details(self) -> dict[str, Any]:
        return {"matrix": [self.n, self.m] if self.rank else None, "rank": self.rank or None}


def plan_parameter(info: ParameterInfo, options: PowerSGD) -> MatrixPlan:
    """Decide for one dense, real parameter.

    A matrix is compressed if `(n + m) * rank * min_compression_rate < n * m` (torch's `_should_compress`) and
    `(n + m) * rank < n * m`.
    """
    parameter = info.parameter
    if parameter.dim() < 2:
        return MatrixPlan.uncompressed(info, "scalar" if parameter.dim() == 0 else "vector")
    n, m = matrix_shape(parameter)
    rank = min(n, m, options.matrix_approximation_rank)
    sent, min_rate = (n + m) * rank, options.min_compression_rate
    if sent >= parameter.numel() or sent * min_rate >= parameter.numel():
        saved = parameter.numel() / sent
        return MatrixPlan.uncompressed(info, f"saves only {saved:.2g}x (min_compression_rate={min_rate:g})")
    plan = MatrixPlan.uncompressed(info, "")
    return dataclasses.replace(plan, compressed=True, flags=1, n=n, m=m, rank=rank)


def plan_bucket(parameters: Sequence[ParameterInfo], rank: int) -> MatrixPlan:
    """Decide for a whole bucket, which batched PowerSGD treats as one square matrix padded with zeros."""
    numel = sum(info.numel for info in parameters)
    dtype = parameters[0].parameter.dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype  # DDP passes a complex bucket as real numbers
    side = square_side(numel)
    rank = min(side, rank)
    first, last = parameters[0].name, parameters[-1].name
    label = first if len(parameters) == 1 else f"bucket {first} .. {last} ({len(parameters)} parameters)"
    sparse = any(info.sparse for info in parameters)
    complex_numbers = any(info.parameter.is_complex() for info in parameters)
    # The key identifies the sequence of parameters: another bucket layout has another matrix.
    key = f"batched.{agreement_key([info.name for info in parameters]):016x}"
    plan = MatrixPlan(label, (numel,), numel, dtype, state_name=key, lowered=not sparse)
    if sparse or complex_numbers or 2 * side * rank >= numel:
        reason = "sparse gradient" if sparse else "complex numbers" if complex_numbers else "too small"
        return dataclasses.replace(plan, reason=reason)
    return dataclasses.replace(plan, compressed=True, flags=len(parameters), n=side, m=side, rank=rank)


def square_side(numel: int) -> int:
    """Side of the smallest square that holds `numel` elements."""
    return math.isqrt(max(numel - 1, 0)) + 1 if numel else 0


def memory_plan(plans: Sequence[MatrixPlan], packed: int, *, error_feedback: bool) -> MemoryPlan:
    """Bytes on each rank. `packed`: those of the message buffers."""
    residual = factors = copies = 0
    for p in plans:
        if not p.compressed:
            continue
        itemsize = compute_dtype(p.dtype).itemsize
        residual += p.numel * itemsize if error_feedback else 0
        factors += (p.rank * p.m + max(p.rank, 2) * (p.n + p.m)) * itemsize
        if p.n * p.m != p.numel or real_itemsize(p.dtype) != itemsize:
            copies += p.n * p.m * itemsize
    return MemoryPlan(residual, factors, packed, "P and Q", copies)


def packed_bytes(rows: Sequence[MatrixPlan], wire: torch.dtype | None) -> int:
    """Bytes of the message buffers of one bucket; an upper bound if `rows` are those of several."""
    matrices = [p for p in rows if p.compressed]
    if not matrices:
        return 0
    plain = sum(p.numel_sent * p.wire_itemsize(wire) for p in rows if not p.compressed and p.lowered)
    return plain + sum((p.numel_sent + p.flags) * p.wire_itemsize(wire) for p in matrices)
