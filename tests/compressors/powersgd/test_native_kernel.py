"""Where `fused` is not set: the native kernel if all ranks have the same one, else torch, and a line that says why."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.kernel import TORCH
from commhooks.compressors.powersgd import native_products
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.ddp_comm_hooks import powerSGD_hook
from tests.support.compilers import needs_compiler
from tests.support.ddp_steps import log_lines, process_group_of_one
from tests.support.models import same_bits
from tests.support.simulation import SimulatedRanks
from tests.support.training import SEVERAL_BUCKETS_MB, flat, make_model

NO_COMPILER = {"CC": "/bin/false"}
"""Of a machine without a compiler."""
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


@contextmanager
def _machine(cache: Path, broken: bool = False, other: bool = False) -> Iterator[None]:
    """This rank is on a machine without a compiler, or on one of another kind. The file of a kernel depends on compiler
    and flags, so that neither finds that of the usual one."""
    environment = NO_COMPILER if broken else {"XDG_CACHE_HOME": str(cache)} if other else {}
    flags = native_products.FLAGS + (OTHER_BUILD if other else ())
    native_products.load.cache_clear()
    try:
        with mock.patch.dict(os.environ, environment), mock.patch.object(native_products, "FLAGS", flags):
            yield
    finally:
        native_products.load.cache_clear()


def _trained(fused: bool | None, bare: bool) -> tuple[Any, ...]:
    """Kernel, weights and warnings of a run; or the error and how long it took to come."""
    began = time.monotonic()
    ddp = torch.nn.parallel.DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    with log_lines() as lines:
        try:
            if bare:
                state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1, fused=fused)
                ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            else:
                options = {"start_powerSGD_iter": 1, "fused": fused}
                hook = commhooks.attach(ddp, "powerSGD", hook_options=options)
            for _ in range(4):
                ddp(torch.full((4, 1, 8, 8), 1.0 + dist.get_rank())).square().sum().backward()
        except commhooks.CommHookError as error:
            return type(error).__name__, str(error), time.monotonic() - began
    kernel = state.session.compressor.kernel.name if bare else hook.stats()["kernel"]
    gradients = flat(p.grad for p in ddp.parameters() if p.grad is not None)
    return kernel, gradients, [line for line in lines if "kernel" in line]


def _on_two_machines(cache: Path, broken: list[int], other: list[int]) -> dict[Any, tuple[Any, ...]]:
    rank = dist.get_rank()
    with _machine(cache, rank in broken, rank in other):
        return {(fused, bare): _trained(fused, bare) for fused in (None, False, True) for bare in (False, True)}


def _one_rank_is_told(ranks: list[dict[Any, tuple[Any, ...]]], bare: bool) -> str:
    """What rank 0 says where `fused` is left alone; all compute with torch, as with False."""
    for rank in ranks:
        for fused in (None, False):
            kernel, gradients, _ = rank[fused, bare]
            assert kernel == "torch" and same_bits(gradients, ranks[0][False, bare][1])
        assert not [line for line in rank[False, bare][2] if "native" in line]
    first, *others = ([line for line in rank[None, bare][2] if "native" in line] for rank in ranks)
    assert not any(others)
    (line,) = first
    return line


@needs_compiler
def test_on_machines_that_are_alike(run_ranks: Any, cache: Path) -> None:
    ranks = run_ranks(_on_two_machines, cache, [], [])
    for bare in (False, True):
        for rank in ranks:
            assert [rank[fused, bare][0] for fused in (None, True, False)] == ["native", "native", "torch"]
            assert same_bits(rank[None, bare][1], ranks[0][True, bare][1])
    (line,) = ranks[0][None, False][2]
    assert line.startswith("commhooks: powerSGD (rank 1, from step 1; native kernel): ")
    assert not ranks[1][None, False][2] and not ranks[0][None, True][2] and not ranks[0][False, False][2]


@needs_compiler
def test_one_machine_without_a_compiler(run_ranks: Any, cache: Path) -> None:
    ranks = run_ranks(_on_two_machines, cache, [1], [])
    for bare in (False, True):
        line = _one_rank_is_told(ranks, bare)
        assert "PowerSGD computes with the kernel 'torch' on all ranks. ranks [1]: the native kernel cannot be" in line
        assert "or name another one in the environment variable CC" in line and "fused=False does without it" in line
        for rank in ranks:
            kind, text, seconds = rank[True, bare]
            assert kind == ("HookRunError" if bare else "AttachError") and seconds < 20
            assert text.startswith("of 2 ranks these cannot do what all of them ask for: [1]. Why: fused=True: the ")
            assert text.endswith("Without fused=True, torch would compute instead")


def test_no_compiler_anywhere(run_ranks: Any, cache: Path) -> None:
    ranks = run_ranks(_on_two_machines, cache, [0, 1], [])
    for bare in (False, True):
        assert "on all ranks. ranks [0" in _one_rank_is_told(ranks, bare)
        for rank in ranks:
            kind, text, _ = rank[True, bare]
            assert kind == "HookConfigError" and text.startswith("fused=True: the native kernel cannot be compiled: ")


@needs_compiler
@joins_operations
def test_machines_whose_kernels_differ(run_ranks: Any, cache: Path) -> None:
    ranks = run_ranks(_on_two_machines, cache, [], [1])
    for bare in (False, True):
        line = _one_rank_is_told(ranks, bare)
        assert "the ranks' faster kernels differ: ranks [0]: native " in line and "; ranks [1]: native " in line
        for rank in ranks:
            kind, text, seconds = rank[True, bare]
            assert kind == ("HookRunError" if bare else "AttachError") and seconds < 20
            assert text.startswith("the ranks have no kernel in common: ranks [0]: native ")


def _results(cache: Path, flags: tuple[str, ...]) -> bytes:
    with (
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}),
        mock.patch.object(native_products, "FLAGS", flags),
    ):
        return native_products.results_of(native_products.load.__wrapped__(), torch.float32)


@needs_compiler
@joins_operations
def test_a_build_is_known_by_its_bits(cache: Path) -> None:
    usual = native_products.results_of(native_products.load.__wrapped__(), torch.float32)
    assert native_products.results_of(native_products.load.__wrapped__(), torch.float32) == usual
    assert _results(cache, native_products.FLAGS + OTHER_BUILD) != usual
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # vectors of another length add in another order
        assert _results(cache, (*native_products.FLAGS, "-mno-avx512f", "-O1")) != usual


def test_fused_false_asks_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_products, "load", mock.Mock(side_effect=AssertionError("compiled")))
    with process_group_of_one():
        assert _trained(False, bare=False)[0] == "torch"


def test_simulated_ranks_use_the_kernel_of_this_machine(cache: Path) -> None:
    def compressor() -> PowerSGDCompressor:
        made.append(PowerSGDCompressor(commhooks.PowerSGD(start_powerSGD_iter=0, fused=fused)))
        return made[-1]

    for fused in (None, True):
        made: list[PowerSGDCompressor] = []
        with _machine(cache, broken=True):
            if fused:
                with pytest.raises(commhooks.HookConfigError, match="fused=True"):
                    SimulatedRanks(compressor, 2, {"w": torch.empty(20, 30)})
            else:
                SimulatedRanks(compressor, 2, {"w": torch.empty(20, 30)})
                assert [each.kernel for each in made] == [TORCH] * 2
