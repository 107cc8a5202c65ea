"""A test body runs on the CPU, on the CPU taken for an accelerator, and on a GPU, twice.

    @pytest.mark.parametrize("place", PLACES)
    def test_something(run_ranks, place):
        run_ranks(_body, place, world_size=world_size(place))

    def _body(place):
        with entered(place) as here:
            model.to(here.device); DistributedDataParallel(model, process_group=here.group)

The first two run in `make test`, the others (a GPU with gloo and with NCCL) in `make test-cuda`.
torch 2.15 has NCCL twice: "nccl" is the second implementation, "nccl-legacy" the first.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support.features import TORCH
from tests.support.models import masks, relative_error

CPU = "cpu"
MASKED = "cpu as accelerator"  # the code that runs on accelerators, on CPU tensors
GLOO = "cuda over gloo"  # two ranks on one GPU
NCCL = "cuda over nccl"  # one rank: NCCL refuses two on one GPU
NCCL_LEGACY = "cuda over nccl-legacy"

ON_CUDA: list[Any] = [
    *(pytest.param(place, marks=pytest.mark.cuda) for place in (GLOO, NCCL)),
    pytest.param(
        NCCL_LEGACY,
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(TORCH < (2, 15), reason="before torch 2.15 it is nccl itself"),
        ],
    ),
]
PLACES: list[Any] = [CPU, MASKED, *ON_CUDA]


class Here(NamedTuple):
    device: torch.device
    group: dist.ProcessGroup | None


def world_size(place: str) -> int:
    return 1 if place in (NCCL, NCCL_LEGACY) else 2


def on_cuda(place: str) -> bool:
    return place in (GLOO, NCCL, NCCL_LEGACY)


@contextlib.contextmanager
def entered(place: str) -> Iterator[Here]:
    """In a worker: the device and the process group of `place`."""
    device = torch.device("cuda", 0) if on_cuda(place) else torch.device("cpu")
    backend = {NCCL: "nccl", NCCL_LEGACY: "nccl-legacy"}.get(place)
    group = None if backend is None else dist.new_group(backend=backend)
    exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with masks(place == MASKED), exact:
        yield Here(device, group)
    if on_cuda(place):
        torch.cuda.synchronize()  # an error on the device belongs to this test


def same(place: str, got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bit for bit on the CPU; within 1 % of the norm on a GPU, where the order may vary."""
    if not on_cuda(place):
        return torch.equal(got, expected)
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and relative_error(got, expected) < 1e-2
    )
