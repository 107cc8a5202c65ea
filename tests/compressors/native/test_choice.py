"""The native kernel if all ranks have the same one, else torch, and a line that says why."""

import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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
from tests.support.compilers import another_library, needs_compiler
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.kernels import computing_with
from tests.support.models import same_bits
from tests.support.simulation import SimulatedRanks
from tests.support.training import SEVERAL_BUCKETS_MB, Run, flat, make_model

NO_COMPILER = "/bin/false"
OTHER_BUILD = ("-ffp-contract=off",)
"""Flags with which the last bits differ, as on another processor."""
joins_operations = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT" and platform.machine() not in ("aarch64", "arm64"),
    reason="needs a processor that joins multiplications and additions",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of kernels of another build, which are not for the user's cache."""
    return tmp_path_factory.mktemp("cache")


def _machine(cache: Path, broken: bool = False, other: bool = False) -> AbstractContextManager[None]:
    """This rank is on a machine without a compiler, or on one of another kind. The file of the library depends on
    compiler and flags, so that neither finds the usual one."""
    if broken:
        return another_library(compiler=NO_COMPILER)
    return another_library(*OTHER_BUILD, cache=cache) if other else nullcontext()


def _trained(bare: bool) -> tuple[Any, ...]:
    """Kernel, gradients and warnings of a run."""
    ddp = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    with log_lines() as lines:
        if bare:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            hook = commhooks.attach(ddp, "powerSGD", hook_options={"start_powerSGD_iter": 1})
        for _ in range(4):
            ddp(torch.full((4, 1, 8, 8), 1.0 + dist.get_rank())).square().sum().backward()
    kernel = {True: "native", False: "torch"}[state.session.compressor.native] if bare else hook.stats()["kernel"]
    gradients = flat(p.grad for p in ddp.parameters() if p.grad is not None)
    return kernel, gradients, [line for line in lines if "kernel" in line]


def _on_machines(cache: Path, bare: bool, broken: list[int], other: list[int], off: list[int]) -> tuple[Any, ...]:
    """A run in which some ranks have no compiler, have another kind of processor, or have the kernel switched off; and
    one with torch on all ranks."""
    rank = dist.get_rank()
    with _machine(cache, rank in broken, rank in other), computing_with("torch" if rank in off else "native"):
        mixed = _trained(bare)
    with computing_with("torch"):
        return mixed, _trained(bare)


def _one_line(ranks: list[Any]) -> list[str]:
    """What is logged on rank 0 where all ranks compute with torch after all; other ranks log nothing."""
    for (kernel, gradients, _), (torch_alone, expected, unsaid) in ranks:
        assert kernel == torch_alone == "torch" and same_bits(gradients, ranks[0][1][1])
        assert same_bits(gradients, expected) and not [line for line in unsaid if "native" in line]
    first, *others = ([line for line in mixed[2] if "native" in line] for mixed, _ in ranks)
    assert not any(others)
    return first


both_ways = pytest.mark.parametrize("bare", [False, True], ids=["attached", "bare"])


@needs_compiler
@both_ways
def test_on_machines_that_are_alike(run_ranks: Any, cache: Path, bare: bool) -> None:
    ranks = run_ranks(_on_machines, cache, bare, [], [], [])
    for (kernel, gradients, _), (without, _, unsaid) in ranks:
        assert (kernel, without) == ("native", "torch") and same_bits(gradients, ranks[0][0][1])
        assert not [line for line in unsaid if "native" in line]
    said, unsaid = (mixed[2] for mixed, _ in ranks)
    assert not unsaid and len(said) == (not bare)
    begin = "commhooks: powerSGD (rank 1; native kernel): plain all-reduce until step 1, then "
    assert all(line.startswith(begin) for line in said)


@needs_compiler
@both_ways
@pytest.mark.parametrize("broken", [[1], [0, 1]], ids=str)
def test_machines_without_a_compiler(run_ranks: Any, cache: Path, bare: bool, broken: list[int]) -> None:
    (line,) = _one_line(run_ranks(_on_machines, cache, bare, broken, [], []))
    assert f"computes with the kernel 'torch' on all ranks. ranks {broken}: the native kernel cannot be" in line
    assert "or name another one in the environment variable CC" in line and "COMMHOOKS_NATIVE=0 does without it" in line


@needs_compiler
@joins_operations
@both_ways
def test_machines_whose_kernels_differ(run_ranks: Any, cache: Path, bare: bool) -> None:
    (line,) = _one_line(run_ranks(_on_machines, cache, bare, [], [1], []))
    assert "the ranks' kernels differ: ranks [0]: native " in line and "; ranks [1]: native " in line


@needs_compiler
@both_ways
def test_where_it_is_switched_off_on_one_rank_all_compute_with_torch(run_ranks: Any, cache: Path, bare: bool) -> None:
    (line,) = _one_line(run_ranks(_on_machines, cache, bare, [], [], [1]))
    assert "the ranks' kernels differ: ranks [0]: native " in line and "; ranks [1]: torch (" in line
    assert not _one_line(run_ranks(_on_machines, cache, bare, [], [], [0]))


def _other_kernel_after_a_load(before: str, after: str) -> torch.Tensor:
    with computing_with(before):
        saved = Run.new(hook_options={"start_powerSGD_iter": 1}).train(4).save(residual="per_rank")
    with computing_with(after):
        run = Run.new(hook_options={"start_powerSGD_iter": 1}).load(saved).train(4)
    assert run.hook.stats()["kernel"] == after and run.hook.stats()["compressed_steps"] == 4
    return run.weights()


@needs_compiler
def test_the_kernel_may_change_with_a_resume(run_ranks: Any) -> None:
    one, other = run_ranks(_other_kernel_after_a_load, "native", "torch")
    assert same_bits(one, other) and one.isfinite().all()


@needs_compiler
@joins_operations
def test_a_build_is_known_by_its_bits(cache: Path) -> None:
    usual = cpu.results_of(torch.float32)
    assert cpu.results_of(torch.float32) == usual
    with another_library(*OTHER_BUILD, cache=cache):
        assert cpu.results_of(torch.float32) != usual
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # vectors of another length add in another order
        with another_library("-mno-avx512f", "-O1", cache=cache):
            assert cpu.results_of(torch.float32) != usual


def test_switched_off_asks_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", mock.Mock(side_effect=AssertionError("compiled")))
    with process_group_of_one(), computing_with("torch"):
        assert _trained(bare=False)[0] == "torch"


def test_simulated_ranks_use_the_kernel_of_this_machine(cache: Path) -> None:
    def compressor() -> PowerSGDCompressor:
        made.append(PowerSGDCompressor(commhooks.PowerSGD(start_powerSGD_iter=0)))
        return made[-1]

    made: list[PowerSGDCompressor] = []
    with _machine(cache, broken=True):
        SimulatedRanks(compressor, 2, {"w": torch.empty(20, 30)})
    assert [each.native for each in made] == [False] * 2
