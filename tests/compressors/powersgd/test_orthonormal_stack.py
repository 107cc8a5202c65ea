"""A basis for many matrices at once, as on accelerators, where nothing is asked of the device: hard inputs too."""

import pytest
import torch

from commhooks.compressors.powersgd.accelerator import orthonormal_stack
from commhooks.compressors.powersgd.cpu import orthonormal_rows


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _supported(rank: int, columns: int, length: int) -> torch.Tensor:
    """As of a gradient with fewer rows that are not zero than the rank: few tokens of an embedding, dead units."""
    rows = torch.zeros(400, rank, length, dtype=torch.float64)
    rows[:, :, :columns] = _random(400, rank, columns)
    return rows


def _sums(share: float) -> torch.Tensor:
    """u, u + share v, v and u again."""
    u, v = _random(200, 1, 40), _random(200, 1, 40, seed=1)
    return torch.cat([u, u + share * v, v, u], dim=1)


HARD = {
    "random": _random(3, 4, 50),
    "zero": torch.zeros(3, 4, 50),
    "constant": torch.ones(3, 4, 50),
    "tiny": torch.full((3, 4, 50), 1e-38),
    "huge": 1e30 * _random(3, 4, 50),
    "not finite": torch.full((3, 4, 50), float("nan")),
    "square": torch.ones(3, 4, 4),
    "one by one": torch.zeros(3, 1, 1),
    "nearly parallel": 1 + torch.tensor([0, 1e-7, 1e-6, 1e-4])[:, None] * _random(3, 4, 50),
    "all magnitudes": torch.logspace(-30, 30, 16)[:, None] * _random(50, 16, 60),
    **{f"{q} of {n} columns at rank {r}": _supported(r, q, n) for r, q, n in [(4, 3, 50), (8, 3, 8), (16, 8, 31)]},
    **{f"sums with {share:g}": _sums(share) for share in (0.3, 1e-2, 1e-3, 1e-4, 1e-5, 1.3e-6, 1e-7)},
    "low rank": _random(200, 8, 7) @ _random(200, 7, 8, seed=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", HARD)
def test_orthonormal_for_hard_inputs(name: str, dtype: torch.dtype) -> None:
    rows = HARD[name].to(dtype)
    refill = torch.nn.functional.normalize(_random(*rows.shape, seed=3), dim=-1)
    basis = orthonormal_stack(rows, refill).to(dtype).double()
    gram = torch.bmm(basis, basis.transpose(1, 2))
    assert (gram - torch.eye(rows.shape[1])).abs().max() < (1e-6 if dtype == torch.float32 else 1e-9)


def test_the_stack_spans_what_householder_spans() -> None:
    rows = HARD["random"].float()
    rows[1, 2] = rows[1, 0]  # a direction that is missing in one matrix of the stack only
    stacked = orthonormal_stack(rows, torch.nn.functional.normalize(torch.randn(3, 4, 50), dim=-1))
    stacked = stacked.float()
    for i in (0, 2):
        alone, missing = orthonormal_rows(rows[i], None)
        assert not missing.any()
        assert (stacked[i].T @ stacked[i] - alone.T @ alone).abs().max() < 1e-6
    assert (rows - rows @ stacked.transpose(1, 2) @ stacked).abs().max() < 1e-5


def test_numbers_that_are_not_finite_count_as_zero() -> None:
    rows, refill = _random(3, 4, 50), torch.nn.functional.normalize(_random(3, 4, 50, seed=3), dim=-1)
    damaged = rows.clone()
    damaged[0, 1, 2:5] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    rows[0, 1, 2:5] = 0
    assert torch.equal(orthonormal_stack(damaged, refill), orthonormal_stack(rows, refill))
