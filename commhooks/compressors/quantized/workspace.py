"""The buffers for quantising the buckets of one layout, allocated once. They belong to one session and are never
saved."""

from collections.abc import Sequence

import torch

from commhooks.compressors.plan import UnitPlan
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.gradient_blocks import GradientBlocks
from commhooks.compressors.quantized.mean import Numbers, QuantisedMean
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import compute_dtype


class Workspace:
    """Buffers of one bucket layout, on its device.

    Args:
        plans: one per slot of the layout, in order.
        wire_dtype: the dtype in which uncompressed elements travel.

    Attributes:
        delta: gradient plus residual, then what is left of it, then the averaged gradient: `blocks + 1` rows. The last
            one is zero.
        gradients: the compressed parameters, in `delta`.
        plain: the uncompressed ones.
    """

    def __init__(
        self,
        layout: BucketLayout,
        plans: Sequence[UnitPlan],
        code: BlockCode,
        wire_dtype: torch.dtype,
        *,
        error_feedback: bool,
    ) -> None:
        pairs = list(zip(layout.slots, plans, strict=True))
        self.plain = [slot for slot, plan in pairs if not plan.compressed]
        slots = [slot for slot, plan in pairs if plan.compressed]
        blocks = sum(code.blocks_of(slot.numel) for slot in slots)
        dtype = compute_dtype(layout.dtype)
        self.delta = torch.zeros(blocks + 1, code.block_size, dtype=dtype, device=layout.device)
        self.gradients = GradientBlocks(slots, code, self.delta[:-1], error_feedback=error_feedback)
        self._code = code
        self._wire_dtype = wire_dtype
        self._means: dict[int, QuantisedMean] = {}

    def mean(self, world_size: int) -> QuantisedMean:
        """The mean over so many ranks; every call returns the same object."""
        if world_size not in self._means:
            plain = Numbers(sum(slot.numel for slot in self.plain), self._wire_dtype)
            self._means[world_size] = QuantisedMean(
                self._code,
                self.gradients.units,
                self.delta.dtype,
                plain,
                len(self.gradients.slots),
                world_size=world_size,
                device=self.delta.device,
            )
        return self._means[world_size]
