"""The plan of PowerSGD with the wrappers "int8" and "int4": which gradients become quantised factors, and which are
quantised as they are."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commhooks.compressors.powersgd.matrix_plan import MatrixPlan
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.unit_plan import real_itemsize
from commhooks.gradients.precision import compute_dtype


@dataclass(frozen=True)
class QuantisedPlan(MatrixPlan):
    """A gradient as two factors in blocks, or in blocks as it is (`rank` 0), or uncompressed with a reason. A flag of
    one byte per parameter says whether there is a gradient."""

    bits: int = 0
    blocks: int = 0
    """Of both factors, or of the gradient."""
    block_bytes: int = 0
    """Codes and scale of a block."""

    columns: ClassVar[tuple[str, ...]] = (*MatrixPlan.columns, "bits")

    @property
    def cells(self) -> tuple[str, ...]:
        return *super().cells, str(self.bits)

    @property
    def details(self) -> dict[str, Any]:
        return super().details | {"bits": self.bits or None, "blocks": self.blocks or None}

    def sent_bytes(self, wire_dtype: torch.dtype | None) -> int:
        if not self.compressed:
            return super().sent_bytes(wire_dtype)
        return self.blocks * self.block_bytes


def quantised_plan(plan: MatrixPlan, code: BlockCode, *, as_it_is: bool) -> QuantisedPlan:
    """The form that takes the fewest bytes: quantised factors where `plan`, the one without a wrapper, has factors;
    with `as_it_is` the gradient in blocks, also if it takes as many; or the uncompressed gradient."""
    itemsize = compute_dtype(plan.dtype).itemsize
    block_bytes = code.block_bytes + itemsize
    made = QuantisedPlan(**{each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)})
    quantised = dataclasses.replace(
        made, compressed=True, flags=plan.flags or 1, itemsize_sent=1, bits=code.bits, block_bytes=block_bytes
    )
    smallest, least = made, plan.numel * real_itemsize(plan.dtype)
    if plan.compressed:
        blocks = code.blocks_of(plan.rank * plan.n) + code.blocks_of(plan.rank * plan.m)
        reason = f"too small for blocks of {code.block_size}"
        smallest = dataclasses.replace(made, compressed=False, flags=0, n=0, m=0, rank=0, reason=reason)
        if blocks * block_bytes < least:
            smallest, least = dataclasses.replace(quantised, blocks=blocks), blocks * block_bytes
    blocks = code.blocks_of(plan.numel)
    if as_it_is and (blocks * block_bytes < least or blocks == smallest.blocks > 0):
        smallest = dataclasses.replace(quantised, blocks=blocks, n=0, m=0, rank=0, reason="")
    return smallest


def quantised_bytes(rows: Sequence[MatrixPlan], code: BlockCode) -> int:
    """Bytes of the message buffers of one bucket, without the padding of shares: the blocks before and after the mean,
    codes and scales as they are made, sent and received twice, and uncompressed elements in the same five places."""
    compressed = [plan for plan in rows if isinstance(plan, QuantisedPlan) and plan.compressed]
    if not compressed:
        return 0
    itemsize = compute_dtype(compressed[0].dtype).itemsize
    blocks = sum(plan.blocks for plan in compressed)
    plain = sum(plan.numel for plan in rows if not plan.compressed and plan.lowered)
    factors = sum(plan.rank * (plan.n + plan.m) for plan in compressed)
    in_blocks = blocks * (2 * code.block_size * itemsize + 4 * compressed[0].block_bytes)
    return in_blocks + (factors + 5 * plain + len(compressed)) * itemsize
