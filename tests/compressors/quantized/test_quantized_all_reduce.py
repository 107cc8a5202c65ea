"""`commhooks.quantized_all_reduce`: within its bound of the exact mean, the same bits on all ranks, nothing lost with a
residual."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import commhooks
from commhooks.compressors.native.tables import address
from commhooks.compressors.quantized import standalone as module
from tests.support.ddp_steps import process_group_of_one
from tests.support.models import same_bits

LEVELS, BLOCK = {8: 127, 4: 7}, {8: 256, 4: 128}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHAPES = ((), (3, 5), (257,), (2, 7, 91), (4, 0))


def _own(shape: tuple[int, ...], dtype: torch.dtype, rank: int, call: int = 0) -> torch.Tensor:
    noise = torch.Generator().manual_seed(100 * call + rank)
    sizes = torch.logspace(-2, 2, max(1, torch.Size(shape).numel()), dtype=torch.float64)
    numbers = torch.randn(sizes.shape, generator=noise, dtype=torch.float64) * sizes
    return numbers[: torch.Size(shape).numel()].view(shape).to(dtype)


def _strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same numbers, in memory in other ways."""
    yield tensor.clone()
    if tensor.dim():
        yield torch.stack([tensor] * 2, -1)[..., 1]
        yield tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        yield torch.cat([tensor[:1], tensor])[1:]


def _averaged(bits: int) -> list[tuple[torch.dtype, tuple[int, ...], torch.Tensor]]:
    """For each dtype and shape the result, which does not depend on strides, the kernel, autograd or autocast."""
    found = []
    for dtype in DTYPES:
        for shape in SHAPES:
            own = _own(shape, dtype, dist.get_rank())
            results = list(_strided(own)) + [own.clone().requires_grad_()]
            for each in results:
                with torch.autocast("cpu"):
                    assert commhooks.quantized_all_reduce(each, bits) is None  # type: ignore[func-returns-value]
            mixed = own.clone()  # some ranks have a compiler
            with mock.patch.object(module, "_has_kernel", lambda *_: dist.get_rank() == 0):
                commhooks.quantized_all_reduce(mixed, bits)
            results.append(mixed)
            with mock.patch.object(module, "_has_kernel", lambda *_: False):
                commhooks.quantized_all_reduce(own, bits)
            assert all(same_bits(each.detach().clone(memory_format=torch.contiguous_format), own) for each in results)
            found.append((dtype, shape, own))
    return found


def _blocks(numbers: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(numbers.flatten(), (0, -numbers.numel() % size)).view(-1, size)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_result_is_within_its_bound_of_the_mean(run_ranks: Any, bits: int, world_size: int) -> None:
    ranks, largest = run_ranks(_averaged, bits, world_size=world_size), 0.0
    for results in zip(*ranks, strict=True):
        dtype, shape, result = results[0]
        assert all(same_bits(each, result) for _, _, each in results)
        own = [_own(shape, dtype, rank).double() for rank in range(world_size)]
        error = _blocks(result.double() - sum(own) / world_size, BLOCK[bits])
        tops = torch.stack([_blocks(each, BLOCK[bits]).abs().amax(1) for each in own]).mean(0).unsqueeze(1)
        bound = tops / LEVELS[bits] + tops * torch.finfo(dtype).eps
        assert bool((error.abs() <= bound).all()), (dtype, shape)
        largest = max([largest, *(error.abs() / bound).nan_to_num().flatten().tolist()])
    assert 0.4 < largest <= 1, "the bound is not far from what happens"


def _with_residual(bits: int, dtype: torch.dtype, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the results, and the residual."""
    residual = torch.zeros(3, 700, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    strided = torch.stack([residual, residual])[1]
    total = torch.zeros(3, 700, dtype=torch.float64)
    for call in range(calls):
        own = _own((3, 700), dtype, dist.get_rank(), call % 2)
        again = own.clone()
        commhooks.quantized_all_reduce(own, bits, residual=residual)
        with mock.patch.object(module, "_has_kernel", lambda *_: False):
            commhooks.quantized_all_reduce(again, bits, residual=strided)
        assert same_bits(own, again) and same_bits(residual, strided)
        total += own
    return total, residual


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_with_a_residual_nothing_is_lost(run_ranks: Any, bits: int, world_size: int) -> None:
    """So the mean over many calls comes to the exact one."""
    calls = 10
    ranks = run_ranks(_with_residual, bits, torch.float64, calls, world_size=world_size)
    exact = sum(_own((3, 700), torch.float64, rank, call % 2) for rank in range(world_size) for call in range(calls))
    left: Any = sum(residual for _, residual in ranks) / world_size
    torch.testing.assert_close(ranks[0][0] + left, exact / world_size, rtol=0, atol=1e-9)
    assert float(left.abs().max()) > 0.1, "a single call loses something"
    assert float(left.abs().max()) < 3 * 100 * world_size / LEVELS[bits], "and it does not grow"


def test_a_residual_of_16_bit_numbers_is_in_32(run_ranks: Any) -> None:
    (total, residual), _ = run_ranks(_with_residual, 8, torch.bfloat16, 3)
    assert residual.dtype == torch.float32 and bool(residual.any()) and bool(total.any())


def _not_finite() -> dict[str, bool]:
    rank, found = dist.get_rank(), {}
    residual = torch.zeros(600)
    commhooks.quantized_all_reduce(_own((600,), torch.float32, rank), residual=residual)
    before = residual.clone()
    for value in (float("inf"), float("nan")):
        own = torch.ones(600)
        if rank == 1:
            own[300] = value
        for loads in (module._has_kernel, lambda *_: False):
            again = own.clone()
            with mock.patch.object(module, "_has_kernel", loads):
                commhooks.quantized_all_reduce(again, residual=residual)
            found[f"{value} {loads}"] = bool(again[256:512].isnan().all()) and not bool(again[:256].isnan().any())
    found["residual"] = same_bits(residual, before)
    zeros = torch.zeros(600)
    commhooks.quantized_all_reduce(zeros, residual=residual)
    found["zeros are numbers, and the residual comes with them"] = bool(zeros.any()) and not torch.equal(
        residual, before
    )
    return found


def test_what_is_not_finite_makes_its_block_nan_and_changes_no_residual(run_ranks: Any) -> None:
    for rank in run_ranks(_not_finite):
        assert len(rank) == 6 and all(rank.values()), rank


def _in_a_group() -> tuple[float, str]:
    group = dist.new_group([0, 2])
    tensor, refused = torch.full((5,), float(dist.get_rank())), ""
    try:
        commhooks.quantized_all_reduce(tensor, group=group)
    except commhooks.HookConfigError as error:
        refused = str(error)
    return float(tensor.sum()), refused


def test_the_mean_is_that_of_the_group(run_ranks: Any) -> None:
    (first, _), (other, refused), (last, _) = run_ranks(_in_a_group, world_size=3)
    assert first == last == pytest.approx(5) and other == 5
    assert "expected a process group of which this rank is a member" in refused


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"bits": 16}, r"bits=16\): expected 8 or 4"),
        ({"bits": "8"}, r"bits='8'\): expected 8 or 4"),
        ({"tensor": [1.0]}, "tensor is a list; expected a tensor"),
        (
            {"tensor": torch.zeros(4, dtype=torch.int32)},
            "tensor is int32, strided; expected a dense tensor in float16, ",
        ),
        ({"tensor": torch.zeros(4, dtype=torch.complex64)}, "tensor is complex64, strided; expected"),
        ({"tensor": torch.zeros(4).to_sparse()}, "tensor is float32, sparse_coo; expected a dense tensor"),
        ({"tensor": torch.zeros(1).expand(4)}, "tensor is expanded, and cannot be changed in place; pass a clone"),
        ({"residual": 0}, "residual is a int; expected a tensor"),
        (
            {"residual": torch.zeros(4, 1)},
            r"residual has shape \(4, 1\) on cpu; expected that of tensor, \(4,\) on cpu",
        ),
        ({"residual": torch.zeros(4, dtype=torch.float64)}, "residual is float64, strided; expected .* in float32"),
        (
            {"tensor": torch.zeros(4).half(), "residual": torch.zeros(4).half()},
            "residual is float16, strided; expected a dense tensor in float32",
        ),
        ({"group": 3}, r"group=3\): expected a process group of which this rank is a member"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(commhooks.HookConfigError, match=text):
        commhooks.quantized_all_reduce(**{"tensor": torch.zeros(4), **arguments})


@pytest.mark.timeout(60)
def test_shards_are_refused() -> None:
    """They have no memory of their own, in which C would look."""
    with process_group_of_one():
        shard = distribute_tensor(torch.ones(300), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(commhooks.HookConfigError, match=r"tensor is a DTensor; pass tensor.to_local\(\), and as"):
            commhooks.quantized_all_reduce(shard)
        with pytest.raises(
            commhooks.HookRunError, match="the native kernel needs 300 contiguous numbers .* and got a DTensor of"
        ):
            address(shard, torch.float32, 300)
        commhooks.quantized_all_reduce(shard.to_local())
        assert torch.allclose(shard.to_local(), torch.ones(300))


def test_it_needs_a_process_group() -> None:
    with pytest.raises(commhooks.HookRunError, match="no process group"):
        commhooks.quantized_all_reduce(torch.zeros(4))
