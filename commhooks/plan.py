"""What is compressed and what is not, and why: decided from shapes and options alone, the same on every rank."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from commhooks.layout import matrix_shape


@dataclass(frozen=True)
class ParameterPlan:
    """The fate of one parameter: `n x m` at `rank` if compressed, else `reason`."""

    name: str
    shape: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    compressed: bool
    reason: str
    n: int = 0
    m: int = 0
    rank: int = 0
    alternate: bool = False
    """Only one of the two factors travels in a step, P and Q in turn."""

    @property
    def numel_sent(self) -> int:
        """Elements that travel per rank and step once compression has begun (the mean of two steps that alternate)."""
        sent = (self.n + self.m) * self.rank if self.compressed else self.numel
        return sent // 2 if self.compressed and self.alternate else sent


def plan_parameter(
    name: str,
    parameter: torch.Tensor,
    *,
    matrix_approximation_rank: int,
    min_compression_rate: float,
    sparse: bool = False,
    alternate: bool = False,
    excluded_by: str | None = None,
) -> ParameterPlan:
    """Decide for one parameter; `excluded_by` is the pattern of `exclude` that it matches, if any.

    A matrix is compressed where `(n + m) * rank * min_compression_rate < n * m` (torch's `_should_compress`) and where
    that saves anything at all.
    """
    numel = parameter.numel() * (2 if parameter.is_complex() else 1)

    def verdict(reason: str, compressed: bool = False, n: int = 0, m: int = 0, rank: int = 0) -> ParameterPlan:
        return ParameterPlan(name, tuple(parameter.shape), numel, parameter.dtype, compressed, reason, n, m, rank)

    if sparse:
        return verdict("sparse gradient")
    if excluded_by is not None:
        return verdict(f"excluded by {excluded_by!r}")
    if parameter.is_complex():
        return verdict("complex numbers")
    if parameter.dim() < 2:
        return verdict("scalar" if parameter.dim() == 0 else "vector")
    if numel == 0:
        return verdict("empty")
    n, m = matrix_shape(parameter)
    rank = min(n, m, matrix_approximation_rank)
    sent = (n + m) * rank
    if sent >= numel or sent * min_compression_rate >= numel:
        return verdict(f"saves only {numel / sent:.2g}x (min_compression_rate={min_compression_rate:g})")
    return dataclasses.replace(verdict("", True, n, m, rank), alternate=alternate)


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a whole model. `print(plan)` shows a table with one line per parameter."""

    hook: str
    parameters: tuple[ParameterPlan, ...]
    wire_dtype: torch.dtype | None = None
    start_step: int = 0
    """Compression begins after this many steps."""
    low_rank: bool = True
    """Whether the hook compresses by low rank at all."""

    @property
    def bytes_before(self) -> int:
        """Bytes of gradient per rank and step without the hook."""
        return sum(p.numel * _itemsize(p.dtype) for p in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Bytes that the hook hands to all-reduce per rank and step once it compresses, flags not counted."""
        return sum(p.numel_sent * self._wire_itemsize(p) for p in self.parameters)

    @property
    def compressed(self) -> tuple[ParameterPlan, ...]:
        return tuple(p for p in self.parameters if p.compressed)

    @property
    def compressed_share(self) -> float:
        """Share of the gradient's bytes that is compressed, 0 to 1."""
        before = self.bytes_before
        return sum(p.numel * _itemsize(p.dtype) for p in self.compressed) / before if before else 0.0

    @property
    def _unknown(self) -> bool:
        """A DDP model has parameters: there is no plan for them yet."""
        return self.low_rank and not self.parameters

    def _wire_itemsize(self, parameter: ParameterPlan) -> int:
        if self.wire_dtype is None or parameter.reason == "sparse gradient":
            return _itemsize(parameter.dtype)
        return min(_itemsize(parameter.dtype), self.wire_dtype.itemsize)

    def summary(self) -> str:
        """One line: what is compressed and how many MB travel per step and rank."""
        if self._unknown:
            return f"{self.hook}: the plan follows DDP's buckets; it is known after the first backward pass"
        if not self.low_rank:
            return (
                f"{len(self.parameters)} parameters, "
                f"{self.bytes_before / 1e6:.3f} MB -> {self.bytes_after / 1e6:.3f} MB per step and rank"
            )
        return (
            f"{len(self.compressed)} of {len(self.parameters)} parameters compressed "
            f"({100 * self.compressed_share:.1f} % of the bytes), "
            f"{self.bytes_before / 1e6:.3f} MB -> {self.bytes_after / 1e6:.3f} MB per step and rank"
        )

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        if self._unknown:
            return self.summary()
        title = f"{self.hook}: compressed from step {self.start_step} on" if self.low_rank else self.hook
        table = Table(title=title, box=box.SIMPLE)
        # Names and reasons are folded where they do not fit, never cut; numbers stay whole.
        table.add_column("parameter", overflow="fold")
        table.add_column("shape", overflow="fold")
        for column, justify in (("n x m", "left"), ("rank", "right"), ("MB", "right"), ("MB sent", "right")):
            if self.low_rank or column.startswith("MB"):
                table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        if self.low_rank:
            table.add_column("not compressed because", overflow="fold")
        for p in self.parameters:
            matrix = [f"{p.n} x {p.m}", str(p.rank)] if p.compressed else ["", ""]
            table.add_row(
                p.name,
                "x".join(map(str, p.shape)) or "scalar",
                *(matrix if self.low_rank else []),
                f"{p.numel * _itemsize(p.dtype) / 1e6:.3f}",
                f"{p.numel_sent * self._wire_itemsize(p) / 1e6:.3f}",
                *([p.reason] if self.low_rank else []),
            )
        # A name is not markup, and ":x:" in it not an emoji.
        console = Console(width=120, color_system=None, markup=False, emoji=False, highlight=False)
        with console.capture() as capture:
            console.print(table)
        return capture.get() + self.summary()


def square_side(numel: int) -> int:
    """Side of the smallest square that holds `numel` elements (batched PowerSGD)."""
    return math.isqrt(max(numel - 1, 0)) + 1 if numel else 0


def _itemsize(dtype: torch.dtype) -> int:
    # A complex number counts as two real ones in `numel`.
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
