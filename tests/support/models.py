"""Small models for tests on several ranks, and prescribed gradients for them."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks.gradients import precision

Shapes = Mapping[str, tuple[int, ...]]
Gradients = dict[str, torch.Tensor]

# Two matrices of the same shape, a convolution, and vectors: at ranks 1 and 2 every kind of
# parameter is there.
SHAPES: Shapes = {
    "conv": (8, 3, 3, 3),
    "conv_bias": (8,),
    "first": (24, 16),
    "first_bias": (24,),
    "second": (24, 16),
    "second_bias": (24,),
    "wide": (10, 40),
    "wide_bias": (10,),
}


class Prescribed(torch.nn.Module):
    """A model that is called with its own gradients: d/dp of sum(p * g) is g."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: Gradients) -> torch.Tensor:
        return torch.stack(
            [(parameter * gradients[name]).sum() for name, parameter in self.named_parameters()]
        ).sum()


def mlp(width: int, layers: int, bias: bool = True) -> torch.nn.Sequential:
    """`layers` square linear layers, so that most matrices have the same shape."""
    blocks: list[torch.nn.Module] = []
    for _ in range(layers):
        blocks += [torch.nn.Linear(width, width, bias=bias), torch.nn.Tanh()]
    return torch.nn.Sequential(*blocks[:-1])


def random_gradients(
    shapes: Shapes, rank: int, step: int, dtype: torch.dtype = torch.float32
) -> Gradients:
    """Return the gradients of `rank` at `step`: a common part plus half of its own."""
    common = torch.Generator().manual_seed(1_000_003 * (step + 1))
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + rank + 1)
    gradients = {}
    for name, shape in shapes.items():
        gradient = torch.randn(shape, generator=common, dtype=torch.float64)
        gradient += 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        gradients[name] = gradient.to(dtype)
    return gradients


def backward(ddp_model: DistributedDataParallel, gradients: Gradients) -> Gradients:
    """Run one synchronised backward pass of a `Prescribed` model; return DDP's gradients."""
    ddp_model.zero_grad()
    ddp_model(gradients).backward()
    return {
        name: p.grad.clone()
        for name, p in ddp_model.module.named_parameters()
        if p.grad is not None
    }


def wrap(
    shapes: Shapes, bucket_cap_mb: float = 25, dtype: torch.dtype = torch.float32
) -> DistributedDataParallel:
    """Wrap a `Prescribed` model in DDP. With a cap of `EVERY_PARAMETER` each parameter has a bucket
    of its own.
    """
    return DistributedDataParallel(Prescribed(shapes, dtype), bucket_cap_mb=bucket_cap_mb)


EVERY_PARAMETER = 1e-6


def masks(pretend: bool = True) -> contextlib.AbstractContextManager[object]:
    """Context manager: treat CPU tensors as an accelerator's, which the host must not read."""
    return mock.patch.object(precision, "is_host_readable", lambda device: not pretend)


def bits_equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Whether tensors are bit-equal; NaN equals NaN."""
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def same(one: Any, other: Any) -> bool:
    """Whether payloads, or parts of them, have the same types, keys and bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return |got - expected| / |expected| in float64."""
    got = got.double()
    expected = expected.double()
    return float((got - expected).norm() / expected.norm())


def worst_error(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative error over the tensors."""
    assert got.keys() == expected.keys()
    return max(relative_error(got[name], expected[name]) for name in expected)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)
