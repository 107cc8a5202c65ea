"""The buffers for quantising the buckets of one layout, allocated once. They belong to one session and are never
saved."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from commhooks.compressors.plan import UnitPlan
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.gradient_blocks import GradientBlocks
from commhooks.compressors.quantized.mean import QuantisedMean
from commhooks.compressors.quantized.mean_buffers import MeanBuffers, Numbers
from commhooks.compressors.quantized.native_gradients import NativeGradients
from commhooks.compressors.quantized.native_mean import NativeDelta, NativeMean
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.precision import compute_dtype

AnyMean = TypeVar("AnyMean", bound=MeanBuffers)


class _Workspace(ABC, Generic[AnyMean]):
    """Buffers of one bucket layout, on its device.

    Args:
        plans: one per slot of the layout, in order.
        wire_dtype: the dtype in which uncompressed elements travel.

    Attributes:
        slots: the compressed parameters.
        units: the name and the number of blocks of each.
        plain: the uncompressed ones.
    """

    def __init__(
        self, layout: BucketLayout, plans: Sequence[UnitPlan], code: BlockCode, wire_dtype: torch.dtype
    ) -> None:
        pairs = list(zip(layout.slots, plans, strict=True))
        self.slots: list[Slot] = [slot for slot, plan in pairs if plan.compressed]
        self.units = [(slot.name, code.blocks_of(slot.numel)) for slot in self.slots]
        self.plain = [slot for slot, plan in pairs if not plan.compressed]
        self._dtype = compute_dtype(layout.dtype)
        self._code = code
        self._numbers = Numbers(sum(slot.numel for slot in self.plain), wire_dtype)
        self._means: dict[int, AnyMean] = {}

    def mean(self, world_size: int) -> AnyMean:
        """The mean over so many ranks; every call returns the same object."""
        if world_size not in self._means:
            self._means[world_size] = self._new_mean(world_size)
        return self._means[world_size]

    @abstractmethod
    def _new_mean(self, world_size: int) -> AnyMean: ...


class Workspace(_Workspace[QuantisedMean]):
    """Computes with torch.

    Attributes:
        delta: gradient plus residual, then what is left of it, then the averaged gradient: `blocks + 1` rows. The last
            one is zero.
        gradients: the compressed parameters, in `delta`.
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
        super().__init__(layout, plans, code, wire_dtype)
        blocks = sum(count for _, count in self.units)
        self.delta = torch.zeros(blocks + 1, code.block_size, dtype=self._dtype, device=layout.device)
        self.gradients = GradientBlocks(self.slots, code, self.delta[:-1], error_feedback=error_feedback)

    def _new_mean(self, world_size: int) -> QuantisedMean:
        return QuantisedMean(
            self._code,
            self.units,
            self._dtype,
            self._numbers,
            len(self.slots),
            world_size=world_size,
            device=self.delta.device,
        )


class NativeWorkspace(_Workspace[NativeMean]):
    """Computes with the native kernel, in the bucket.

    Attributes:
        gradients: the compressed parameters.
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
        super().__init__(layout, plans, code, wire_dtype)
        self.gradients = NativeGradients(self.slots, layout, error_feedback=error_feedback)

    @property
    def delta(self) -> NativeDelta:
        return self.gradients.delta

    def _new_mean(self, world_size: int) -> NativeMean:
        return NativeMean(
            self._code,
            self.units,
            self._dtype,
            self._numbers,
            len(self.slots),
            world_size=world_size,
            spans=self.delta.spans,
        )
