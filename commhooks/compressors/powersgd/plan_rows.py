"""What is compressed and what is not, and why: decided from shapes and options alone, the same on every rank."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch

from commhooks.compressors.config import PowerSGD
from commhooks.gradients.layout import matrix_shape
from commhooks.gradients.names import Names
from commhooks.hook.plan import ParameterPlan


def plan_rows(hook: str, names: Names, options: PowerSGD | None, sparse: Collection[int] = ()) -> list[ParameterPlan]:
    """A row for each parameter that `names` knows.

    Args:
        hook: its name.
        options: of PowerSGD; None for a hook that compresses nothing by low rank.
        sparse: ids of the parameters whose gradients are sparse.
    """
    if options is None:
        return [_row(name, parameter, f"hook {hook}") for name, parameter in names.known().items()]
    return [
        plan_parameter(
            name,
            parameter,
            options,
            sparse=id(parameter) in sparse,
            excluded_by=names.excluded_by(name, options.exclude),
        )
        for name, parameter in names.known().items()
    ]


def plan_parameter(
    name: str, parameter: torch.Tensor, options: PowerSGD, *, sparse: bool = False, excluded_by: str | None = None
) -> ParameterPlan:
    """Decide for one parameter; `excluded_by` is the pattern of `exclude` that it matches, if any.

    A matrix is compressed where `(n + m) * rank * min_compression_rate < n * m` (torch's `_should_compress`) and where
    that saves anything at all.
    """
    left_alone = _row(name, parameter, "")

    def because(reason: str) -> ParameterPlan:
        return dataclasses.replace(left_alone, reason=reason)

    if sparse:
        return because("sparse gradient")
    if excluded_by is not None:
        return because(f"excluded by {excluded_by!r}")
    if parameter.is_complex():
        return because("complex numbers")
    if parameter.dim() < 2:
        return because("scalar" if parameter.dim() == 0 else "vector")
    if parameter.numel() == 0:
        return because("empty")
    n, m = matrix_shape(parameter)
    rank = min(n, m, options.matrix_approximation_rank)
    sent, min_rate = (n + m) * rank, options.min_compression_rate
    if sent >= parameter.numel() or sent * min_rate >= parameter.numel():
        return because(f"saves only {parameter.numel() / sent:.2g}x (min_compression_rate={min_rate:g})")
    return dataclasses.replace(left_alone, compressed=True, n=n, m=m, rank=rank, alternate=options.alternate)


def plan_bucket(
    names: Sequence[str], numel: int, dtype: torch.dtype, *, rank: int, sparse: bool, complex_numbers: bool
) -> ParameterPlan:
    """Decide for a bucket as a whole, which batched PowerSGD sees as one square matrix padded with zeros."""
    side = square_side(numel)
    rank = min(side, rank)
    label = names[0] if len(names) == 1 else f"bucket {names[0]} .. {names[-1]} ({len(names)} parameters)"
    if sparse or complex_numbers or 2 * side * rank >= numel:
        reason = "sparse gradient" if sparse else "complex numbers" if complex_numbers else "too small"
        return ParameterPlan(label, (numel,), numel, dtype, False, reason)
    return ParameterPlan(label, (numel,), numel, dtype, True, "", side, side, rank)


def square_side(numel: int) -> int:
    """Side of the smallest square that holds `numel` elements (batched PowerSGD)."""
    return math.isqrt(max(numel - 1, 0)) + 1 if numel else 0


def _row(name: str, parameter: torch.Tensor, reason: str) -> ParameterPlan:
    """Of a parameter that is not compressed. A complex number counts as two."""
    numel = parameter.numel() * (2 if parameter.is_complex() else 1)
    return ParameterPlan(name, tuple(parameter.shape), numel, parameter.dtype, False, reason)
