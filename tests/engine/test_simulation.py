"""The loopback computes what a simulated rank computes, bit for bit, with every kind of collective; and what simulated
ranks do besides. That they are as real ones: `test_every_compressor.py`."""

from typing import Any

import pytest
import torch

from commhooks.compressors.base import Compressor
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.compressors.quantized.exchange import Int8Compressor
from commhooks.compressors.quantized.options import Int8Compress
from commhooks.engine.state import LearnedState
from tests.support.local_driver import LocalDriver
from tests.support.models import same_bits
from tests.support.scaled import Scaled, ScaledCompressor
from tests.support.simulation import SimulatedRanks

STEPS = 4
SHAPES = {"0.0": (12, 8), "0.1": (10,), "0.2": (6, 20)}


def _compressor(name: str) -> Compressor[Any]:
    if name == "scaled":
        return ScaledCompressor(Scaled())
    if name == "int8":
        return Int8Compressor(Int8Compress(block_size=16))
    config = PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=0, min_compression_rate=1)
    return PowerSGDCompressor(config)


def _parameters() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def _gradient(step: int, rank: int) -> torch.Tensor:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))


def _learned(state: LearnedState) -> list[torch.Tensor]:
    return [each for key in sorted(state.entries) for _, each in sorted(state[key].items())]


def _simulated(name: str, world_size: int) -> list[list[torch.Tensor]]:
    ranks = SimulatedRanks(lambda: _compressor(name), world_size, _parameters())
    found: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    with torch.no_grad():
        for step in range(STEPS):
            buckets = [_gradient(step, rank) for rank in range(world_size)]
            assert ranks.step(buckets)
            for rank, bucket in enumerate(buckets):
                found[rank].append(bucket)
    return [[*each, *_learned(state)] for each, state in zip(found, ranks.states, strict=True)]


@pytest.mark.parametrize("name", ["scaled", "powerSGD", "int8"])
def test_the_loopback_is_a_simulated_rank_alone(name: str) -> None:
    """With two buckets, whose exchanges take turns."""
    alone = _simulated(name, 1)[0]
    loopback = LocalDriver(_compressor(name), [_parameters(), {"other": torch.zeros(9, 7)}], torch.device("cpu"))
    (flat, _), (other, _) = loopback._buckets
    found = []
    for step in range(STEPS):
        loopback.fill()
        assert bool(other.any())
        flat.copy_(_gradient(step, 0))
        loopback.step()
        found.append(flat.clone())
    state = loopback._state
    assert state.step == STEPS and any("other" in state[key] for key in state.entries)
    for key in state.entries:
        state[key].pop("other", None)
    assert all(map(same_bits, [*found, *_learned(state)], alone))


@pytest.mark.parametrize("name", ["powerSGD", "int8"])
def test_the_loopback_averages_what_is_not_compressed(name: str) -> None:
    loopback = LocalDriver(_compressor(name), [{"w": torch.zeros(12, 8)}, {"v": torch.zeros(3)}], torch.device("cpu"))
    loopback.fill()
    before = loopback._buckets[1][0].clone()
    loopback.step()
    assert torch.equal(loopback._buckets[1][0], before) and not loopback._state["residual"].keys() - {"w"}


def test_simulated_ranks_obey_options_that_name_parameters() -> None:
    config = PowerSGD(matrix_approximation_rank=3, exclude=["0.0"], min_compression_rate=1)
    ranks = SimulatedRanks(lambda: PowerSGDCompressor(config), 2, _parameters())
    assert [getattr(plan, "rank", None) for plan in ranks.plans] == [0, 0, 3]


@pytest.mark.parametrize("name", ["scaled", "powerSGD", "int8"])
def test_a_step_that_is_not_finite_is_told_and_leaves_nothing(name: str) -> None:
    ranks = SimulatedRanks(lambda: _compressor(name), 2, _parameters())
    buckets = [_gradient(0, rank) for rank in range(2)]
    buckets[1][3] = float("inf")
    assert not ranks.step(buckets)
    assert [(state.step, state.nonfinite_steps) for state in ranks.states] == [(0, 1), (0, 1)]
    assert not any(_learned(state) for state in ranks.states)


@pytest.mark.parametrize("name", ["powerSGD", "int8"])
def test_simulated_ranks_average_what_is_not_compressed(name: str) -> None:
    ranks = SimulatedRanks(lambda: _compressor(name), 2, {"v": torch.zeros(3), "w": torch.zeros(1, 1)})
    buckets = [torch.arange(4.0), torch.ones(4)]
    assert ranks.step(buckets) and ranks.bytes_sent == 4 * 4
    assert all(bucket.tolist() == [0.5, 1, 1.5, 2] for bucket in buckets)
    assert [state.step for state in ranks.states] == [1, 1] and not any(map(_learned, ranks.states))
