"""Define plans: what a compressor does with each parameter, from shapes and options alone."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from commhooks.gradients.names import ParameterNames
from commhooks.options import HookConfig

AnyPlan = TypeVar("AnyPlan", bound="UnitPlan")


@dataclass(frozen=True)
class ParameterInfo:
    """Describes a parameter to `Compressor.plan`. The parameter may be on the meta device."""

    name: str
    parameter: torch.Tensor
    sparse: bool = False
    """Whether its gradient is sparse."""
    excluded_by: str | None = None
    """The glob in the option `exclude` that matches the name, or None."""

    @classmethod
    def of(
        cls,
        name: str,
        parameter: torch.Tensor,
        names: ParameterNames,
        config: HookConfig,
        sparse: bool = False,
    ) -> "ParameterInfo":
        return cls(name, parameter, sparse, names.first_match(name, config.excluded_globs))

    @property
    def numel(self) -> int:
        """Number of real elements; a complex element counts as two."""
        return self.parameter.numel() * (2 if self.parameter.is_complex() else 1)

    @property
    def incompressible(self) -> str | None:
        """Why no compressor of single parameters compresses it, or None."""
        if self.sparse:
            return "sparse gradient"
        if self.excluded_by is not None:
            return f"excluded by {self.excluded_by!r}"
        if self.parameter.is_complex():
            return "complex numbers"
        return "empty" if self.parameter.numel() == 0 else None


@dataclass(frozen=True)
class UnitPlan:
    """Describes how one unit, a parameter or a whole bucket, is compressed.

    Subclass it to add data.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    compressed: bool = False
    reason: str = ""
    """Why the unit is not compressed."""
    numel_compressed: int = 0
    """Elements sent per rank and step once compression has begun."""
    flags: int = 0
    """Extra elements sent, such as a flag or a checksum, not counted in `numel_compressed`."""
    itemsize_sent: int | None = None
    """Bytes per sent element.

    None: the itemsize of the gradient's dtype, or of a wrapper's dtype if narrower.
    """
    state_name: str = ""
    """The key of the learned state if a bucket is planned as a whole, compressed or not.

    Empty for a parameter, whose key is its name.
    """
    lowered: bool = True
    """Whether a wrapper casts it to its dtype. False for sparse gradients."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Headings of the extra columns that `cells` fills in the table of a plan."""

    @property
    def key(self) -> str:
        return self.state_name or self.name

    @property
    def numel_sent(self) -> int:
        """Elements sent per rank and step, without flags."""
        return self.numel_compressed if self.compressed else self.numel

    @property
    def cells(self) -> tuple[str, ...]:
        """One string per entry of `columns`, for a compressed unit."""
        return ("",) * len(self.columns)

    @property
    def details(self) -> dict[str, Any]:
        """Extra entries for the plan as JSON, in plain types."""
        return {}

    @classmethod
    def uncompressed(cls: type[AnyPlan], info: ParameterInfo, reason: str) -> AnyPlan:
        shape = tuple(info.parameter.shape)
        dtype = info.parameter.dtype
        return cls(info.name, shape, info.numel, dtype, reason=reason, lowered=not info.sparse)

    def wire_itemsize(self, wire_dtype: torch.dtype | None) -> int:
        """Return the bytes of one sent element.

        `wire_dtype` is the dtype to which the hook or its wrapper casts, or None.
        """
        if self.compressed and self.itemsize_sent is not None:
            return self.itemsize_sent
        itemsize = real_itemsize(self.dtype)
        if wire_dtype is None or not self.lowered:
            return itemsize
        return min(itemsize, wire_dtype.itemsize)

    def sent_bytes(self, wire_dtype: torch.dtype | None) -> int:
        return self.numel_sent * self.wire_itemsize(wire_dtype)

    def size_bytes(self) -> int:
        return self.numel * real_itemsize(self.dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """Counts the bytes of memory that a hook needs on each rank.

    They are needed on the CPU once the hook compresses, on an accelerator from the first backward
    pass on. Not counted are the received messages of quantised hooks on an accelerator, which every
    step allocates.
    """

    residual: int = 0
    factors: int = 0
    """Learned state other than residuals, and working buffers."""
    packed: int = 0
    """Messages of the collectives."""
    factors_are: str = "other state"
    """The name of `factors` in messages."""
    copies: int = 0
    """Copies of gradients, padded, or in float32 if the bucket's dtype is narrower."""
    host: int = 0
    """Learned state in host memory while the model is on an accelerator; not part of `total`."""

    @property
    def total(self) -> int:
        return self.residual + self.factors + self.packed + self.copies


def real_itemsize(dtype: torch.dtype) -> int:
    """Return the bytes of one real element; a complex element counts as two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


class Unit(NamedTuple):
    """Formats all sizes in one text or table in the same unit, kB or MB."""

    name: str
    size: int

    @classmethod
    def of(cls, largest: float) -> "Unit":
        return cls("kB", 1000) if largest < 10**6 else cls("MB", 10**6)

    def number(self, size: float) -> str:
        return f"{size / self.size:.3f}"

    def text(self, size: float) -> str:
        return f"{self.number(size)} {self.name}"
