"""The quantised hooks on machines with and without a compiler: all ranks compute with one kernel, and the bits do not
depend on which."""

import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.kernel import KernelHere
from commhooks.compressors.quantized import native_blocks
from commhooks.compressors.quantized.exchange import Int8Compressor
from tests.support.compilers import needs_compiler
from tests.support.ddp_steps import log_lines
from tests.support.kernels import computing_with
from tests.support.models import same_bits
from tests.support.training import SEVERAL_BUCKETS_MB, flat, make_model


def _trained(hook: str) -> tuple[Any, ...]:
    """Kernel, gradients and what is logged."""
    ddp = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    with log_lines() as lines:
        attached = commhooks.attach(ddp, hook, hook_options={"block_size": 32})
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            ddp.zero_grad()
            ddp(torch.randn(4, 1, 8, 8, generator=generator)).square().sum().backward()
    gradients = flat(p.grad for p in ddp.parameters() if p.grad is not None)
    return attached.stats()["kernel"], gradients, [line for line in lines if "kernel" in line]


def _on_machines(cache: Path, broken: list[int]) -> dict[Any, tuple[Any, ...]]:
    """By hook, and by whether the native kernel is switched off."""
    environment = {"XDG_CACHE_HOME": str(cache), "CC": "/bin/false"} if dist.get_rank() in broken else {}
    native_blocks.load.cache_clear()
    found = {}
    try:
        with mock.patch.dict(os.environ, environment):
            for hook, kernel in itertools.product(("int8", "int4"), ("native", "torch")):
                with computing_with(kernel):
                    found[hook, kernel] = _trained(hook)
    finally:
        native_blocks.load.cache_clear()
    return found


@needs_compiler
def test_with_compilers_everywhere(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_on_machines, tmp_path, [], world_size=3)
    for hook in ("int8", "int4"):
        for rank, kernel in itertools.product(ranks, ("native", "torch")):
            assert rank[hook, kernel][0] == kernel
            assert same_bits(rank[hook, kernel][1], ranks[0][hook, "torch"][1])
        (line,) = ranks[0][hook, "native"][2]
        assert "; native kernel): " in line


@needs_compiler
def test_one_machine_without_a_compiler(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_on_machines, tmp_path, [1])
    for hook in ("int8", "int4"):
        (line,) = ranks[0][hook, "native"][2]
        assert "computes with the kernel 'torch' on all ranks. ranks [1]: the native kernel cannot be compiled" in line
        assert all(rank[hook, "native"][0] == "torch" for rank in ranks)


def test_nothing_is_missing_where_the_kernel_does_not_apply() -> None:
    compressor = Int8Compressor(commhooks.Int8Compress())
    with mock.patch.object(native_blocks, "build", side_effect=AssertionError("compiled")):
        assert compressor.kernel_here(torch.device("cuda"), torch.float32) == KernelHere()
        with computing_with("torch"):
            assert compressor.kernel_here(torch.device("cpu"), torch.float32) == KernelHere()
