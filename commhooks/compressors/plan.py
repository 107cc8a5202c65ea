"""What a compressor decides about each parameter: plain data, made from shapes and options alone."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch


@dataclass(frozen=True)
class ParameterInfo:
    """What a compressor may know of a parameter when it plans. The parameter may be on the meta device."""

    name: str
    parameter: torch.Tensor
    sparse: bool = False
    """Its gradient is sparse."""
    excluded_by: str | None = None
    """The glob of the option `exclude` that it matches, if any."""

    @property
    def numel(self) -> int:
        """A complex number counts as two."""
        return self.parameter.numel() * (2 if self.parameter.is_complex() else 1)


@dataclass(frozen=True)
class UnitPlan:
    """The fate of one parameter (of one bucket, for a compressor of whole buckets).

    A compressor with more to remember than this derives from it.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    compressed: bool = False
    reason: str = ""
    """Why it is not compressed."""
    numel_compressed: int = 0
    """Elements that travel per rank and step for it once compression has begun."""
    flags: int = 0
    """Elements beside them, such as a flag or a check; counted apart."""
    state_name: str = ""
    """Of a bucket compressed as a whole: the key of its learned state. A parameter's key is its name."""
    lowered: bool = True
    """Travels in the dtype of a wrapper where that is narrower. False for sparse gradients."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Headings of what `cells` shows in the table of a plan."""

    @property
    def key(self) -> str:
        """The key of its learned state."""
        return self.state_name or self.name

    @property
    def numel_sent(self) -> int:
        """Elements that travel per rank and step, flags left out."""
        return self.numel_compressed if self.compressed else self.numel

    @property
    def cells(self) -> tuple[str, ...]:
        """One text per column; empty texts where the parameter is not compressed."""
        return ("",) * len(self.columns)

    @property
    def details(self) -> dict[str, Any]:
        """What JSON shows besides: plain types."""
        return {}

    @classmethod
    def left_alone(cls, info: ParameterInfo, reason: str) -> "UnitPlan":
        """The plan of a parameter that is not compressed."""
        p = info.parameter
        return cls(info.name, tuple(p.shape), info.numel, p.dtype, reason=reason, lowered=not info.sparse)

    def wire_itemsize(self, wire_dtype: torch.dtype | None) -> int:
        """Bytes of an element that travels.

        Args:
            wire_dtype: to which a hook or its wrapper narrows what it sends; None: nothing is narrowed.
        """
        own = real_itemsize(self.dtype)
        return own if wire_dtype is None or not self.lowered else min(own, wire_dtype.itemsize)

    def size_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * real_itemsize(self.dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of memory that a hook needs on each rank once it compresses."""

    residual: int = 0
    factors: int = 0
    """Other learned state, and what the running step works with."""
    packed: int = 0
    """The buffers that travel."""
    factors_are: str = "other state"
    """What `factors` is called in a sentence."""
    copies: int = 0
    """Copies of gradients, in float32 where the bucket is narrower, or padded."""

    @property
    def total(self) -> int:
        return self.residual + self.factors + self.packed + self.copies


def real_itemsize(dtype: torch.dtype) -> int:
    """Bytes of one real number: a complex one counts as two in `numel`."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
