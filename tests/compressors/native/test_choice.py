"""Ranks use the native library if all have the same build, else torch, and a line says why."""

import platform
import re
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.native import library
from commhooks.compressors.powersgd import cpu
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.ddp_comm_hooks import powerSGD_hook
from commhooks.registry import compressor_of
from tests.support.compilers import another_library, needs_compiler
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.kernels import computing_with
from tests.support.models import same_bits
from tests.support.simulation import SimulatedRanks
from tests.support.training import SEVERAL_BUCKETS_MB, Run, flat, make_model

OTHER_BUILD = ("-ffp-contract=off",)
"""Flags with which the last bits of PowerSGD differ, as on another processor."""
joins_operations = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    and platform.machine() not in ("aarch64", "arm64"),
    reason="needs a processor that joins multiplications and additions",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "powerSGD": {"start_powerSGD_iter": 1},
    "bare powerSGD": {"start_powerSGD_iter": 1},
    "int8": {"block_size": 32, "start_iter": 1},
}


def _trained(hook: str) -> tuple[Any, ...]:
    """What the hook computes with, the gradients, and the lines that name a kernel."""
    ddp = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    with log_lines() as lines:
        if hook.startswith("bare"):
            state = powerSGD_hook.PowerSGDState(None, **OPTIONS[hook])
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            attached = commhooks.attach(ddp, hook, hook_options=OPTIONS[hook])
        for _ in range(3):
            ddp(torch.full((4, 1, 8, 8), 1.0 + dist.get_rank())).square().sum().backward()
    bare = hook.startswith("bare")
    kernel = (
        ("native" if state.session.compressor.native else "torch")
        if bare
        else attached.stats()["kernel"]
    )
    return (
        kernel,
        flat(p.grad for p in ddp.parameters() if p.grad is not None),
        [x for x in lines if "kernel" in x],
    )


def _on_machines(machines: dict[str, list[int]]) -> dict[str, list[tuple[Any, ...]]]:
    """Run each hook where some ranks lack the library, and once with torch on all ranks."""
    outcomes = {}
    with ExitStack() as stack:
        if dist.get_rank() in machines.get("broken", []):
            stack.enter_context(another_library(compiler="/bin/false"))
        if dist.get_rank() in machines.get("other", []):
            stack.enter_context(another_library(*OTHER_BUILD))
        off = dist.get_rank() in machines.get("off", [])
        for hook in OPTIONS if not machines or "other" in machines else ("powerSGD", "int8"):
            with computing_with("torch" if off else "native"):
                mixed = _trained(hook)
            with computing_with("torch"):
                outcomes[hook] = [mixed, _trained(hook)]
    return outcomes


REASONS = {
    "alike": ({}, ""),
    "one without a compiler": (
        {"broken": [1]},
        (
            r"ranks \[1\]: the native kernel cannot be compiled: /bin/false .*CC."
            r" .*COMMHOOKS_NATIVE=0 turns it off"
        ),
    ),
    "another kind": (
        {"other": [1]},
        r"the ranks' kernels differ: ranks \[0\]: native \w+ .*; ranks \[1\]: native \w+",
    ),
    "switched off on rank 1": (
        {"off": [1]},
        r"kernels differ: ranks \[0\]: native .*; ranks \[1\]: torch \(",
    ),
    "switched off on rank 0": ({"off": [0]}, ""),
}


@needs_compiler
@joins_operations
@pytest.mark.parametrize("machines", REASONS)
def test_all_ranks_compute_with_the_same(run_ranks: Any, machines: str) -> None:
    arranged, reason = REASONS[machines]
    with another_library(*OTHER_BUILD) if "other" in arranged else nullcontext():
        library.load()  # here, because the other ranks wait for 30 s only
    ranks = run_ranks(_on_machines, arranged)
    for hook in ranks[0]:
        quantised = hook.startswith("int")
        # int8 and int4 have the same bits on every kind
        native = not arranged or (quantised and "other" in arranged)
        line = "" if native else reason
        (kernel, gradients, lines), (torch_alone, expected, _) = ranks[0][hook]
        assert (kernel, torch_alone) == ("native" if native else "torch", "torch")
        for mixed, alone in (rank[hook] for rank in ranks):
            assert (
                mixed[0] == kernel
                and same_bits(mixed[1], gradients)
                and same_bits(alone[1], expected)
            )
        assert same_bits(gradients, expected) or (native and not quantised)
        assert not [line for line in ranks[1][hook][0][2] if "native" in line], (
            "only rank 0 says it"
        )
        named = [line for line in lines if "native" in line]
        if line:
            assert len(named) == 1 and re.search(
                f"computes with the kernel 'torch' on all ranks. .*{line}", named[0]
            )
        else:
            assert ["; native kernel): " in line for line in named] == [True] * (
                native and "bare" not in hook
            )


def _other_kernel_after_a_load(before: str, after: str) -> torch.Tensor:
    with computing_with(before):
        saved = Run.new(hook_options=OPTIONS["powerSGD"]).train(4).save(residual="per_rank")
    with computing_with(after):
        run = Run.new(hook_options=OPTIONS["powerSGD"]).load(saved).train(4)
    assert run.hook.stats()["kernel"] == after and run.hook.stats()["compressed_steps"] == 4
    return run.weights()


@needs_compiler
def test_the_kernel_may_change_with_a_resume(run_ranks: Any) -> None:
    one, other = run_ranks(_other_kernel_after_a_load, "native", "torch")
    assert same_bits(one, other) and one.isfinite().all()


@needs_compiler
@joins_operations
def test_another_build_of_the_kernel_gives_other_bits() -> None:
    usual = cpu.results_of(torch.float32)
    assert cpu.results_of(torch.float32) == usual
    with another_library(*OTHER_BUILD):
        assert cpu.results_of(torch.float32) != usual
    # vectors of another length add in another order
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        with another_library("-mno-avx512f", "-O1"):
            assert cpu.results_of(torch.float32) != usual


def test_no_compiler_is_asked_for_where_the_library_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "load", mock.Mock(side_effect=AssertionError("compiled")))
    with process_group_of_one(), computing_with("torch"):
        assert [_trained(hook)[0] for hook in OPTIONS] == ["torch"] * len(OPTIONS)
    for config, device in ((commhooks.PowerSGD(), "cuda"), (commhooks.Int8Compress(), "meta")):
        assert compressor_of(config)(config).native_build(torch.device(device), torch.float32) == ""


def test_simulated_ranks_use_the_kernel_of_this_machine() -> None:
    def compressor() -> PowerSGDCompressor:
        made.append(PowerSGDCompressor(commhooks.PowerSGD(start_powerSGD_iter=0)))
        return made[-1]

    made: list[PowerSGDCompressor] = []
    with another_library(compiler="/bin/false"):
        SimulatedRanks(compressor, 2, {"w": torch.empty(20, 30)})
    assert [kernel.native for kernel in made] == [False] * 2
