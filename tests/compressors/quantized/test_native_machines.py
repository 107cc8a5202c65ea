"""The quantised hooks on machines with and without a compiler: all ranks compute with one kernel, and the bits do not
depend on which."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.kernel import TORCH, KernelsHere
from commhooks.compressors.quantized import native_blocks
from commhooks.compressors.quantized.compressor import Int8Compressor
from tests.support.compilers import needs_compiler
from tests.support.ddp_steps import log_lines
from tests.support.models import same_bits
from tests.support.training import SEVERAL_BUCKETS_MB, flat, make_model

OPTIONS = (None, True, False)


def _trained(hook: str, fused: bool | None) -> tuple[Any, ...]:
    """Kernel, gradients and what is logged; or the error."""
    ddp = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    with log_lines() as lines:
        try:
            attached = commhooks.attach(ddp, hook, hook_options={"fused": fused, "block_size": 32})
        except commhooks.CommHookError as error:
            return type(error).__name__, str(error)
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            ddp.zero_grad()
            ddp(torch.randn(4, 1, 8, 8, generator=generator)).square().sum().backward()
    gradients = flat(p.grad for p in ddp.parameters() if p.grad is not None)
    return attached.stats()["kernel"], gradients, [line for line in lines if "kernel" in line]


def _on_machines(cache: Path, broken: list[int]) -> dict[Any, tuple[Any, ...]]:
    environment = {"XDG_CACHE_HOME": str(cache), "CC": "/bin/false"} if dist.get_rank() in broken else {}
    native_blocks.load.cache_clear()
    try:
        with mock.patch.dict(os.environ, environment):
            return {(hook, fused): _trained(hook, fused) for hook in ("int8", "int4") for fused in OPTIONS}
    finally:
        native_blocks.load.cache_clear()


@needs_compiler
def test_with_compilers_everywhere(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_on_machines, tmp_path, [], world_size=3)
    for hook in ("int8", "int4"):
        for rank in ranks:
            assert [rank[hook, fused][0] for fused in OPTIONS] == ["native", "native", "torch"]
            assert all(same_bits(rank[hook, fused][1], ranks[0][hook, False][1]) for fused in OPTIONS)
        (line,) = ranks[0][hook, None][2]
        assert "; native kernel): " in line


@needs_compiler
def test_one_machine_without_a_compiler(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_on_machines, tmp_path, [1])
    for hook in ("int8", "int4"):
        (line,) = ranks[0][hook, None][2]
        assert "computes with the kernel 'torch' on all ranks. ranks [1]: the native kernel cannot be compiled" in line
        for rank in ranks:
            assert [rank[hook, fused][0] for fused in (None, False)] == ["torch", "torch"]
            kind, text = rank[hook, True]
            assert kind == "AttachError"
            assert text.startswith("of 2 ranks these cannot do what all of them ask for: [1]. Why: fused=True: the ")


def test_nothing_is_missing_where_the_kernel_does_not_apply() -> None:
    with mock.patch.object(native_blocks, "build", side_effect=AssertionError("compiled")):
        for device, fused in (("cuda", None), ("cuda", False), ("cpu", False)):
            assert _int8(fused).kernels_here(torch.device(device), torch.float32) == KernelsHere((TORCH,))
    with pytest.raises(commhooks.HookConfigError, match="here are gradients in float32 on cuda: leave out fused=True"):
        _int8(True).check_here(torch.device("cuda"), torch.float16)


def _int8(fused: bool | None) -> Int8Compressor:
    return Int8Compressor(commhooks.Int8Compress(fused=fused))
