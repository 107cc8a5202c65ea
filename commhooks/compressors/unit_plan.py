"""A compressor's decision for each parameter: plain data, computed from shapes and options alone."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from commhooks.gradients.names import ParameterNames
from commhooks.options import HookConfig

AnyPlan = TypeVar("AnyPlan", bound="UnitPlan")


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter as a compressor sees it when it plans. The parameter may be on the meta device."""

    name: str
    parameter: torch.Tensor
    sparse: bool = False
    """Its gradient is sparse."""
    excluded_by: str | None = None
    """The glob of the option `exclude` that it matches; None if there is none."""

    @classmethod
    def of(
        cls, name: str, parameter: torch.Tensor, names: ParameterNames, config: HookConfig, sparse: bool = False
    ) -> "ParameterInfo":
        """A parameter with these names, for the compressor with that config."""
        return cls(name, parameter, sparse, names.first_match(name, config.excluded_globs))

    @property
    def numel(self) -> int:
        """Number of elements; a complex number counts as two."""
        return self.parameter.numel() * (2 if self.parameter.is_complex() else 1)


@dataclass(frozen=True)
class UnitPlan:
    """The decision for one unit: a parameter, or a bucket for a compressor of whole buckets.

    A compressor whose plan holds more data derives a class from it.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    compressed: bool = False
    reason: str = ""
    """The reason why it is not compressed."""
    numel_compressed: int = 0
    """Elements sent per rank and step for it once compression has begun."""
    flags: int = 0
    """Further elements sent, such as a flag or a checksum; not included in `numel_compressed`."""
    itemsize_sent: int | None = None
    """Bytes per sent element; None: those of the gradient's dtype, or of a wrapper's if that is narrower."""
    state_name: str = ""
    """The key of the learned state of a bucket that is planned as a whole, compressed or not. The key of a parameter is
    its name."""
    lowered: bool = True
    """Sent in the dtype of a wrapper if that is narrower. False for sparse gradients."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Headings of the columns that `cells` adds to the table of a plan."""

    @property
    def key(self) -> str:
        """The key of its learned state."""
        return self.state_name or self.name

    @property
    def numel_sent(self) -> int:
        """Elements sent per rank and step, without flags."""
        return self.numel_compressed if self.compressed else self.numel

    @property
    def cells(self) -> tuple[str, ...]:
        """One string per column, of a unit that is compressed."""
        return ("",) * len(self.columns)

    @property
    def details(self) -> dict[str, Any]:
        """Further entries for the plan as JSON: plain types only."""
        return {}

    @classmethod
    def uncompressed(cls: type[AnyPlan], info: ParameterInfo, reason: str) -> AnyPlan:
        """The plan of a parameter that is not compressed."""
        p = info.parameter
        return cls(info.name, tuple(p.shape), info.numel, p.dtype, reason=reason, lowered=not info.sparse)

    def wire_itemsize(self, wire_dtype: torch.dtype | None) -> int:
        """Bytes of one element as it is sent.

        Args:
            wire_dtype: the dtype to which the hook or its wrapper casts what it sends; None: no cast.
        """
        own = real_itemsize(self.dtype)
        if self.compressed and self.itemsize_sent is not None:
            return self.itemsize_sent
        return own if wire_dtype is None or not self.lowered else min(own, wire_dtype.itemsize)

    def sent_bytes(self, wire_dtype: torch.dtype | None) -> int:
        """Bytes sent per rank and step, without flags. `wire_dtype`: see `wire_itemsize`."""
        return self.numel_sent * self.wire_itemsize(wire_dtype)

    def size_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * real_itemsize(self.dtype)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of memory that a hook needs on each rank once it compresses."""

    residual: int = 0
    factors: int = 0
    """Other learned state, and the working buffers of the current step."""
    packed: int = 0
    """The message buffers of the collectives."""
    factors_are: str = "other state"
    """Display name of `factors` in messages."""
    copies: int = 0
    """Copies of gradients: in float32 if the bucket's dtype is narrower, or padded."""
    host: int = 0
    """Learned state in host memory while the model is on an accelerator; not included in `total`."""

    @property
    def total(self) -> int:
        return self.residual + self.factors + self.packed + self.copies


def real_itemsize(dtype: torch.dtype) -> int:
    """Bytes of one real number: a complex one counts as two in `numel`."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


class Unit(NamedTuple):
    """The unit, kB or MB, for all sizes in one text or table."""

    name: str
    size: int

    @classmethod
    def of(cls, largest: float) -> "Unit":
        """The unit in which `largest` bytes, and parts of that, can be read."""
        return cls("kB", 1000) if largest < 10**6 else cls("MB", 10**6)

    def number(self, size: float) -> str:
        return f"{size / self.size:.3f}"

    def text(self, size: float) -> str:
        return f"{self.number(size)} {self.name}"
