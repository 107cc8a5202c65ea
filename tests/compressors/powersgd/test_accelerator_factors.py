"""Factors of all matrices are computed at once, without asking the device, for hard inputs, too."""

import pytest
import torch

from commhooks.compressors.powersgd.accelerator import PackedFactors, new_packed, orthonormal_stack
from commhooks.compressors.powersgd.cpu import orthonormal_rows
from commhooks.compressors.powersgd.exchange import draw


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _supported(rank: int, columns: int, length: int) -> torch.Tensor:
    """Return rows of which fewer than the rank are not zero, as few tokens of an embedding give."""
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
    **{
        f"{q} of {n} columns at rank {r}": _supported(r, q, n)
        for r, q, n in [(4, 3, 50), (8, 3, 8), (16, 8, 31)]
    },
    **{
        f"sums with {share:g}": _sums(share)
        for share in (0.3, 1e-2, 1e-3, 1e-4, 1e-5, 1.3e-6, 1e-7)
    },
    "low rank": _random(200, 8, 7) @ _random(200, 7, 8, seed=1),
}


@pytest.mark.parametrize("name", HARD)
def test_factors_are_orthonormal_for_hard_inputs(name: str) -> None:
    for dtype, most in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
        rows = HARD[name].to(dtype)
        refill = torch.nn.functional.normalize(_random(*rows.shape, seed=3), dim=-1)
        basis = orthonormal_stack(rows, refill).to(dtype).double()
        gram = torch.bmm(basis, basis.transpose(1, 2))
        assert (gram - torch.eye(rows.shape[1])).abs().max() < most


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
    rows = _random(3, 4, 50)
    refill = torch.nn.functional.normalize(_random(3, 4, 50, seed=3), dim=-1)
    damaged = rows.clone()
    damaged[0, 1, 2:5] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    rows[0, 1, 2:5] = 0
    assert torch.equal(orthonormal_stack(damaged, refill), orthonormal_stack(rows, refill))


# ---- factors of different shapes -----------------------------------------------------------------

CPU = torch.device("cpu")
SHAPES = {
    "alike": [(4, 30), (4, 30), (4, 30)],
    "one": [(2, 50_257)],
    "several lengths": [(4, 64), (4, 256), (4, 64), (4, 2304)],
    "unsorted": [(4, 300), (4, 8), (4, 50)],
    "several ranks": [(8, 64), (3, 64), (1, 9), (5, 5)],
    "an embedding beside": [(4, 50_257), (4, 64), (4, 768), (4, 3072)],
    "two groups that grow": [*[(4, 64)] * 4, *[(4, 20_000)] * 2],
}


def _rows(shapes: list[tuple[int, int]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def _factors(shapes: list[tuple[int, int]], dtype: torch.dtype) -> PackedFactors:
    refill = [draw(1, str(i), "refill", *shape, dtype) for i, shape in enumerate(shapes)]
    return PackedFactors(shapes, refill, dtype, CPU)


def _unpacked(factors: PackedFactors, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    pieces = factors.flat.split([rank * length for rank, length in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_a_padded_stack_has_the_bases_of_its_matrices_alone(name: str, dtype: torch.dtype) -> None:
    """Padding changes nothing: each basis is the one that a stack of this matrix alone has."""
    shapes = SHAPES[name]
    rows = _rows(shapes, dtype)
    factors = _factors(shapes, dtype)
    keep = torch.tensor([i != 1 for i in range(len(shapes))])
    for _ in range(2):  # the memory is used again
        factors.orthonormalize(torch.cat([matrix.flatten() for matrix in rows]), keep)
        for i, (one, got) in enumerate(zip(rows, _unpacked(factors, shapes), strict=True)):
            alone = orthonormal_stack(one[None], torch.randn(1, *one.shape))[0].to(dtype)
            wanted = alone if keep[i] else torch.zeros_like(alone)
            assert (got - wanted).abs().max() < (1e-6 if dtype == torch.float32 else 1e-12), i


def test_rows_have_norm_1() -> None:
    shapes = SHAPES["several ranks"]
    rows = _rows(shapes, torch.float32)
    rows[-1][0] = 0
    packed = new_packed(sum(matrix.numel() for matrix in rows), torch.float32, CPU)
    packed[:-1] = torch.cat([matrix.flatten() for matrix in rows])
    factors = _factors(shapes, torch.float32)
    factors.unit_rows(packed)
    got = _unpacked(factors, shapes)
    assert all(((matrix.norm(dim=1) - 1).abs() < 1e-6).all() for matrix in got)
    for one, unit in zip(rows, got, strict=True):
        first = int(one is rows[-1])
        assert torch.allclose(
            unit[first:], torch.nn.functional.normalize(one[first:], dim=1), atol=1e-6
        )
    assert packed[-1] == 0 and torch.equal(
        packed[:-1], torch.cat([matrix.flatten() for matrix in rows])
    )


def test_dependent_rows_are_replaced_in_their_matrix_alone() -> None:
    shapes = SHAPES["several ranks"]
    rows = _rows(shapes, torch.float32)
    rows[0][3] = rows[0][1]
    rows[3].zero_()
    factors = _factors(shapes, torch.float32)
    factors.orthonormalize(
        torch.cat([matrix.flatten() for matrix in rows]), torch.ones(4, dtype=torch.bool)
    )
    for one, basis in zip(rows, _unpacked(factors, shapes), strict=True):
        assert (basis @ basis.T - torch.eye(len(basis))).abs().max() < 1e-6
        assert (one - one @ basis.T @ basis).abs().max() < 1e-5


def test_factors_of_similar_length_share_a_tensor() -> None:
    """Memory stays within four times that of the factors, whatever their lengths."""

    def groups(lengths: list[int]) -> list[list[int]]:
        return [
            group.members for group in _factors([(2, n) for n in lengths], torch.float32)._groups
        ]

    assert groups([768, 3072, 768]) == [[0, 2, 1]]
    assert groups([50_257, 768, 768, 3072, 768]) == [[1, 2, 4, 3], [0]]
    assert groups([10, 1000, 20]) == [[0, 2, 1]]  # small ones always
    assert groups([10_000, 20_000]) == [[0, 1]]
    # five rows of 16,000 are four times as long
    assert groups([1000, 1000, 1000, 1000, 16_000]) == [[0, 1, 2, 3, 4]]
    assert groups([1000, 1000, 1000, 1000, 16_001]) == [[0, 1, 2, 3], [4]]
    shapes = [(r, n) for r in (1, 4, 16) for n in (64, 5000, 20_000, 100_000)]
    padded = sum(
        torch.Size(group.shape).numel() for group in _factors(shapes, torch.float32)._groups
    )
    assert padded < 4 * 16 * sum(n for _, n in shapes)
