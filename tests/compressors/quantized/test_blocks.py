"""Blocks of numbers travel as codes with a scale, and are divided among the ranks."""

import pytest
import torch

from commhooks import Int8Compress
from commhooks.compressors.quantized.compressor import Int8Compressor
from commhooks.compressors.quantized.kernels import add_dequantised, dequantise, quantise
from commhooks.compressors.quantized.mean import BlockCode, Shares
from tests.support.models import masks, same_bits
from tests.support.simulation import SimulatedRanks

SIZE = 32
CODES = [BlockCode(8, SIZE), BlockCode(4, SIZE)]
LARGEST = torch.finfo(torch.float32).max


def _through(
    code: BlockCode, blocks: torch.Tensor, largest: float = LARGEST
) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives, and what is lost."""
    codes = torch.full((len(blocks), code.block_bytes), 85, dtype=torch.uint8)
    scales = torch.empty(len(blocks), dtype=blocks.dtype)
    lost = blocks.clone()
    quantise(code, lost, codes, scales, code.largest_scale(largest, blocks.dtype))
    arrived = dequantise(code, codes, scales, torch.empty_like(blocks))
    total = torch.ones_like(blocks)
    add_dequantised(code, codes, scales, total)
    assert same_bits(total, arrived + 1)
    return arrived, lost


@pytest.mark.parametrize("code", CODES)
def test_whole_numbers_arrive_exactly_and_ties_go_to_even(code: BlockCode) -> None:
    whole = torch.arange(-code.levels, code.levels + 1).float()
    blocks = torch.zeros(-(-len(whole) // (SIZE - 1)), SIZE)
    blocks[:, 0] = code.levels  # a scale of 1
    inside = torch.zeros(len(blocks) * (SIZE - 1))
    inside[: len(whole)] = whole
    blocks[:, 1:] = inside.view(len(blocks), -1)
    arrived, lost = _through(code, blocks)
    assert torch.equal(arrived, blocks) and not lost.any()
    ties = torch.zeros(1, SIZE)
    ties[0, :7] = torch.tensor([code.levels, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    arrived, lost = _through(code, ties)
    assert arrived[0, :7].tolist() == [code.levels, 0, 2, 2, 0, -2, -2]
    assert torch.equal(arrived + lost, ties)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("code", CODES)
def test_an_element_loses_half_a_scale_at_most(code: BlockCode, dtype: torch.dtype) -> None:
    """In more blocks than the host works on at once, of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(2**20 // SIZE + 3, SIZE, generator=generator, dtype=dtype)
    blocks *= torch.logspace(-30, 30, len(blocks), dtype=dtype).unsqueeze(1)
    arrived, lost = _through(code, blocks)
    eps = torch.finfo(dtype).eps
    half = blocks.abs().amax(1, keepdim=True) / code.levels / 2
    assert bool((lost.abs() <= half * (1 + 2 * code.levels * eps)).all())
    assert bool(((arrived + lost - blocks).abs() <= 4 * code.levels * eps * half).all())


@pytest.mark.parametrize("code", CODES)
def test_blocks_without_a_usable_scale_stay(code: BlockCode) -> None:
    blocks = torch.zeros(4, SIZE)
    blocks[1] = 1e-45
    blocks[2] = -1e-40
    blocks[3, 5] = torch.finfo(torch.float32).tiny
    arrived, lost = _through(code, blocks)
    assert not arrived.any() and same_bits(lost, blocks)


@pytest.mark.parametrize("code", CODES)
def test_the_largest_numbers_are_finite_on_arrival(code: BlockCode) -> None:
    blocks = torch.zeros(3, SIZE)
    blocks[0, 0] = LARGEST
    blocks[1, :2] = torch.tensor([-LARGEST, LARGEST])
    blocks[2, 3] = 1e30
    arrived, lost = _through(code, blocks)
    assert bool(arrived.isfinite().all() & lost.isfinite().all())
    torch.testing.assert_close(arrived, blocks, rtol=1e-5, atol=0)
    arrived, lost = _through(
        code, torch.full((1, SIZE), 3e5), largest=torch.finfo(torch.float16).max
    )
    assert bool(arrived.half().isfinite().all()), "it fits into the bucket's dtype"
    assert torch.equal(arrived + lost, torch.full((1, SIZE), 3e5))
    assert float(lost.min()) > 2e5


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("code", CODES)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(code: BlockCode, value: float) -> None:
    blocks = torch.ones(3, SIZE)
    blocks[1, 7] = value
    arrived, _ = _through(code, blocks)
    assert bool(arrived[1].isnan().all())
    torch.testing.assert_close(arrived[[0, 2]], blocks[[0, 2]])


# ---- shares: which rank averages which block -----------------------------------------------------

PARAMETERS = [("a", 1), ("layers.0.weight", 100), ("b", 3), ("layers.1.weight", 101)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_every_block_has_one_owner_and_no_rank_has_many_more(world_size: int) -> None:
    shares = Shares(PARAMETERS, world_size, torch.device("cpu"))
    blocks = sum(count for _, count in PARAMETERS)
    assert sum(shares.counts) == blocks and max(shares.counts) == shares.size
    assert shares.size <= blocks / world_size + len(PARAMETERS)
    blocks_owned = shares.blocks.view(-1)
    assert sorted(blocks_owned[blocks_owned < blocks].tolist()) == list(range(blocks))
    assert torch.equal(blocks_owned[shares.places], torch.arange(blocks))
    for rank, count in enumerate(shares.counts):
        assert bool((shares.blocks[rank, :count] < blocks).all())
        assert bool((shares.blocks[rank, count:] == blocks).all()), "padded with the empty block"


def test_a_parameter_is_divided_equally_wherever_its_name_begins() -> None:
    for name in "abcdefgh":
        for blocks, world_size in [(10, 4), (64, 8), (3, 5)]:
            counts = Shares([(name, blocks)], world_size, torch.device("cpu")).counts
            assert max(counts) - min(counts) <= 1
    first = [
        Shares([(f"layers.{i}.bias", 1)], 4, torch.device("cpu")).pieces[0].owner
        for i in range(200)
    ]
    assert min(first.count(rank) for rank in range(4)) > 25, (
        "small parameters do not meet at one rank"
    )


def _averages(names: list[str], world_size: int) -> dict[str, torch.Tensor]:
    """Averages and residuals after some steps, with the parameters in this order in one bucket."""
    shapes = {"a": (6, 11), "b": (40, 2), "c": (3, 3, 9), "d": (10,)}
    ranks = SimulatedRanks(
        lambda: Int8Compressor(Int8Compress(block_size=16)),
        world_size,
        {n: torch.zeros(shapes[n]) for n in names},
    )
    results: dict[str, torch.Tensor] = {}
    for step in range(5):
        buckets = []
        for rank in range(world_size):
            noise = {
                n: torch.Generator().manual_seed(1000 * step + 10 * rank + ord(n)) for n in names
            }
            buckets.append(
                torch.cat([torch.randn(shapes[n], generator=noise[n]).flatten() for n in names])
            )
        assert ranks.step(buckets)
        results |= {slot.name: slot.of(buckets[0]).clone() for slot in ranks.layout.slots}
    for rank, state in enumerate(ranks.states):
        results |= {
            f"{name} of rank {rank}": residual for name, residual in state["residual"].items()
        }
    return results


@pytest.mark.parametrize(("world_size", "masked"), [(2, False), (3, False), (5, False), (5, True)])
def test_another_layout_changes_no_bit(world_size: int, masked: bool) -> None:
    """`masked`: as on an accelerator, where the ranks are summed in pairs."""
    with torch.no_grad(), masks(masked):
        together = _averages(["a", "b", "c", "d"], world_size)
        for names in (["d", "c", "a", "b"], ["a"], ["b", "d"], ["c"]):
            results = _averages(names, world_size)
            assert len(results) > len(names)
            assert all(same_bits(value, together[name]) for name, value in results.items())
