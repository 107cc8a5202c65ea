"""The buffers for quantising the buckets of one layout, allocated once. They belong to one session and are never
saved."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from commhooks.compressors.plan import UnitPlan
from commhooks.compressors.quantized.blocks import BlockCode
from commhooks.compressors.quantized.gradient_blocks import GradientBlocks
from commhooks.compressors.quantized.mean import QuantisedMean
from commhooks.compressors.quantized.mean_buffers import MeanBuffers, MeanContents, Numbers
from commhooks.compressors.quantized.native_gradients import NativeGradients
from commhooks.compressors.quantized.native_mean import NativeDelta, NativeMean
from commhooks.gradients.layout import BucketLayout, Slot
from commhooks.gradients.precision import compute_dtype

AnyMean = TypeVar("AnyMean", bound=MeanBuffers)


@dataclass(frozen=True)
class PlannedBucket:
    """What is quantised in the buckets of one layout, and what is not.

    Attributes:
        slots: the compressed parameters.
        plain: the uncompressed ones.
        contents: what is averaged: the blocks of `slots`, the elements of `plain`, and a flag for each of `slots`.
    """

    layout: BucketLayout
    slots: Sequence[Slot]
    plain: Sequence[Slot]
    contents: MeanContents

    @classmethod
    def of(
        cls, layout: BucketLayout, plans: Sequence[UnitPlan], code: BlockCode, wire_dtype: torch.dtype
    ) -> "PlannedBucket":
        """`plans`: one per slot of the layout, in order. `wire_dtype`: in which uncompressed elements travel."""
        pairs = list(zip(layout.slots, plans, strict=True))
        slots = [slot for slot, plan in pairs if plan.compressed]
        plain = [slot for slot, plan in pairs if not plan.compressed]
        units = [(slot.name, code.blocks_of(slot.numel)) for slot in slots]
        numbers = Numbers(sum(slot.numel for slot in plain), wire_dtype)
        contents = MeanContents(code, units, compute_dtype(layout.dtype), numbers, flags=len(slots))
        return cls(layout, slots, plain, contents)


class _Workspace(ABC, Generic[AnyMean]):
    """Buffers for the buckets of one layout, on its device.

    Attributes:
        plain: the uncompressed parameters.
    """

    def __init__(self, bucket: PlannedBucket) -> None:
        self.plain = bucket.plain
        self._contents = bucket.contents
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

    def __init__(self, bucket: PlannedBucket, *, error_feedback: bool) -> None:
        super().__init__(bucket)
        contents, device = bucket.contents, bucket.layout.device
        code = contents.code
        self.delta = torch.zeros(contents.blocks + 1, code.block_size, dtype=contents.dtype, device=device)
        self.gradients = GradientBlocks(bucket.slots, code, self.delta[:-1], error_feedback=error_feedback)

    def _new_mean(self, world_size: int) -> QuantisedMean:
        return QuantisedMean(self._contents, world_size, self.delta.device)


class NativeWorkspace(_Workspace[NativeMean]):
    """Computes with the native kernel, in the bucket.

    Attributes:
        gradients: the compressed parameters.
    """

    def __init__(self, bucket: PlannedBucket, *, error_feedback: bool) -> None:
        super().__init__(bucket)
        self.gradients = NativeGradients(bucket.slots, bucket.layout, error_feedback=error_feedback)

    @property
    def delta(self) -> NativeDelta:
        return self.gradients.delta

    def _new_mean(self, world_size: int) -> NativeMean:
        return NativeMean(self._contents, world_size, self.delta.spans)
