"""On a GPU Triton's kernels compute the bits of torch's operators, and int8 and int4 use them."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.compressors.quantized.kernels import TorchKernel
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.sharded.blocks import TorchBlocks
from tests.cuda.places import NCCL, entered
from tests.support.kernels import computing_with
from tests.support.models import same_bits
from tests.support.training import SEVERAL_BUCKETS_MB, batch, make_model

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("ranks", [1, 2, 6, 64])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
@pytest.mark.parametrize(
    "code", [BlockCode(8, 256), BlockCode(4, 128), BlockCode(8, 48), BlockCode(4, 2**14)], ids=str
)
def test_the_bits_are_those_of_torch(code: BlockCode, dtype: torch.dtype, ranks: int) -> None:
    triton_kernel: Any = pytest.importorskip("commhooks.compressors.quantized.triton_kernel")
    device = torch.device("cuda", 0)
    results = [
        triton_kernel.results_of(kernel, device, dtype, code, ranks)
        for kernel in (TorchKernel, triton_kernel.TritonKernel)
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
@pytest.mark.parametrize("block_size", [16, 48, 128, 2**14])
def test_the_bits_of_shards_are_those_of_torch(block_size: int, dtype: torch.dtype) -> None:
    triton_kernel: Any = pytest.importorskip("commhooks.sharded.triton_kernel")
    device = torch.device("cuda", 0)
    code = BlockCode(8, block_size)
    results = [
        triton_kernel.results_of(kernel, device, dtype, code)
        for kernel in (TorchBlocks, triton_kernel.TritonBlocks)
    ]
    assert results[0] == results[1]


def _gradients(hook: str, kernel: str) -> tuple[str, list[torch.Tensor]]:
    with entered(NCCL) as here, computing_with(kernel):
        ddp = DistributedDataParallel(
            make_model().cuda(), bucket_cap_mb=SEVERAL_BUCKETS_MB, process_group=here.group
        )
        attached = commhooks.attach(ddp, hook)
        for step in range(3):
            ddp.zero_grad()
            inputs, targets = batch(0, step)
            torch.nn.functional.cross_entropy(ddp(inputs.cuda()), targets.cuda()).backward()
        return attached.stats()["kernel"], [
            p.grad.cpu() for p in ddp.parameters() if p.grad is not None
        ]


@pytest.mark.parametrize("hook", ["int8", "int4"])
def test_a_training_uses_them(run_ranks: Any, hook: str) -> None:
    pytest.importorskip("triton")
    results = {
        kernel: run_ranks(_gradients, hook, kernel, world_size=1)[0]
        for kernel in ("native", "torch")
    }
    assert {wanted: kernel for wanted, (kernel, _) in results.items()} == {
        "native": "native",
        "torch": "torch",
    }
    assert all(map(same_bits, results["native"][1], results["torch"][1]))
