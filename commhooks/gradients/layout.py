"""Define a bucket of gradients, and the position of each parameter's gradient in it.

DDP packs gradients in the *memory* order of the parameters. The gradient of a channels_last weight
or a transposed parameter is therefore not in logical order, and `GradBucket.gradients()` returns
its elements permuted. Buckets are recognised by their parameters and not by index, because DDP
rebuilds its buckets after the first step.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commhooks.gradients.torch_private import sparse_values


class Bucket:
    """Holds gradients that are reduced together.

    Every rank passes the same buckets in the same order.

    Attributes:
        flat: this rank's gradients, 1-D, replaced in place by the result. A sparse tensor for a
            sparse gradient.
        parameters: in the order of the buffer.
        index: increases within a backward pass.
        nbytes: bytes of the buffer; for a sparse gradient only of the values.
        grad_bucket: the bucket that DDP passed; None without DDP.
        unused: positions of parameters with a gradient that this rank has not used since the last
            synchronised pass.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        index: int = 0,
        is_last: bool = True,
        is_first: bool | None = None,
        grad_bucket: dist.GradBucket | None = None,
    ) -> None:
        self.flat = flat
        self.parameters = parameters
        self.nbytes = sparse_values(flat).nbytes if flat.is_sparse else flat.nbytes
        self.index = index
        self.is_first = index == 0 if is_first is None else is_first
        self.is_last = is_last
        self.grad_bucket = grad_bucket
        self.unused: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Slot:
    name: str
    """Stable name of the parameter, the key of its saved state."""
    parameter: torch.Tensor
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True, eq=False)
class BucketLayout:
    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [slot.parameter for slot in self.slots]

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self.slots]


def memory_order(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of `parameter`, slowest in memory first.

    They are (0, 1, ..) if it is contiguous, (1, 0) if it is transposed. DDP packs a parameter
    contiguously unless it is dense in memory (torch, reducer.cpp, `initialize_bucket_views`).
    """
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    expected = 1
    for dim in reversed(order):
        if parameter.size(dim) != 1:
            if parameter.stride(dim) != expected:
                return tuple(range(parameter.dim()))
            expected *= parameter.size(dim)
    return tuple(order)


def to_logical(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """View elements in memory order as a tensor of the parameter's shape, without a copy."""
    order = memory_order(parameter)
    inverse = [order.index(dim) for dim in range(len(order))]
    return flat.view([parameter.size(dim) for dim in order]).permute(inverse)


def to_memory(logical: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return logical.permute(memory_order(parameter)).reshape(-1)


def bytes_of(tensor: torch.Tensor) -> bytes:
    whole = tensor.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def read_layout(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor], names: Sequence[str]
) -> BucketLayout:
    """Compute the position of each parameter in the buffer `flat`, once per layout."""
    slots: list[Slot] = []
    offset = 0
    for name, parameter in zip(names, parameters, strict=True):
        # DDP passes the gradient of a complex parameter as pairs of real numbers.
        numel = parameter.numel() * (2 if parameter.is_complex() and not flat.is_sparse else 1)
        slots.append(Slot(name, parameter, 0 if flat.is_sparse else offset, numel))
        offset += numel
    if not flat.is_sparse and offset != flat.numel():
        raise RuntimeError(
            f"the parameters of a bucket have {offset} elements, its buffer has {flat.numel()}:"
            f" this version of torch ({torch.__version__}) packs buckets in a way that commhooks"
            " does not support"
        )
    return BucketLayout(tuple(slots), offset, flat.dtype, flat.device, flat.is_sparse)


def matrix_shape(parameter: torch.Tensor) -> tuple[int, int]:
    """Return (n, m) of a parameter, 2-D or more, as a matrix.

    n is the size of its slowest dimension in memory.
    """
    n = parameter.size(memory_order(parameter)[0])
    return n, math.prod(parameter.shape) // n if n else 0
