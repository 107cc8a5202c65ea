"""Which gradients are quantised, the bytes that they take, and the reasons for the others."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.gradients.precision import compute_dtype


@dataclass(frozen=True)
class BlockPlan(UnitPlan):
    """A gradient as blocks of `block_size` elements, or uncompressed with a reason. `numel_compressed` counts bytes:
    codes and scales, with the padding of the last block. A flag of one byte says whether there is a gradient."""

    blocks: int = 0
    bits: int = 0
    block_size: int = 0

    columns: ClassVar[tuple[str, ...]] = ("bits", "blocks")

    @property
    def cells(self) -> tuple[str, ...]:
        return str(self.bits), f"{self.blocks} of {self.block_size}"

    @property
    def details(self) -> dict[str, Any]:
        return {name: getattr(self, name) if self.compressed else None for name in ("bits", "blocks", "block_size")}


def plan_parameter(info: ParameterInfo, code: BlockCode, wire_dtype: torch.dtype) -> UnitPlan:
    """Decide for one dense, real parameter: matrices are quantised where that takes fewer bytes than `wire_dtype`."""
    parameter = info.parameter
    if parameter.dim() < 2:
        return BlockPlan.uncompressed(info, "scalar" if parameter.dim() == 0 else "vector")
    blocks = code.blocks_of(parameter.numel())
    sent = blocks * (code.block_bytes + compute_dtype(parameter.dtype).itemsize)
    if sent >= parameter.numel() * wire_dtype.itemsize:
        return BlockPlan.uncompressed(info, f"too small for a block of {code.block_size}")
    return dataclasses.replace(
        BlockPlan.uncompressed(info, ""),
        compressed=True,
        numel_compressed=sent,
        itemsize_sent=1,
        flags=1,
        blocks=blocks,
        bits=code.bits,
        block_size=code.block_size,
    )
