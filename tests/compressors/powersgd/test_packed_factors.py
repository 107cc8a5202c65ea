"""Factors of different shapes that are normalised and orthonormalised together, in padded tensors."""

import pytest
import torch

from commhooks.compressors.powersgd.accelerator import PackedFactors, new_packed, orthonormal_stack
from commhooks.compressors.powersgd.exchange import draw

CPU = torch.device("cpu")
SHAPES = {
    "alike": [(4, 30), (4, 30), (4, 30)],
    "one": [(2, 50_257)],
    "several lengths": [(4, 64), (4, 256), (4, 64), (4, 2304)],
    "unsorted": [(4, 300), (4, 8), (4, 50)],
    "several ranks": [(8, 64), (3, 64), (1, 9), (5, 5)],
    "an embedding beside": [(4, 50_257), (4, 64), (4, 768), (4, 3072)],
}


def _rows(shapes: list[tuple[int, int]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _factors(shapes: list[tuple[int, int]], dtype: torch.dtype) -> PackedFactors:
    refill = [draw(1, str(i), "refill", *shape, dtype) for i, shape in enumerate(shapes)]
    return PackedFactors(shapes, refill, dtype, CPU)


def _unpacked(factors: PackedFactors, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    pieces = factors.flat.split([rank * length for rank, length in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_together_as_alone(name: str, dtype: torch.dtype) -> None:
    """Padding changes nothing: each basis is the one that a stack of this matrix alone has."""
    shapes = SHAPES[name]
    rows = _rows(shapes, dtype)
    factors = _factors(shapes, dtype)
    keep = torch.tensor([i != 1 for i in range(len(shapes))])
    for _ in range(2):  # the memory is used again
        factors.orthonormalise(torch.cat([each.flatten() for each in rows]), keep)
        for i, (one, got) in enumerate(zip(rows, _unpacked(factors, shapes), strict=True)):
            alone = orthonormal_stack(one[None], torch.randn(1, *one.shape))[0].to(dtype)
            wanted = alone if keep[i] else torch.zeros_like(alone)
            assert (got - wanted).abs().max() < (1e-6 if dtype == torch.float32 else 1e-12), i


@pytest.mark.parametrize("name", SHAPES)
def test_unit_rows(name: str) -> None:
    shapes = SHAPES[name]
    rows = _rows(shapes, torch.float32)
    rows[-1][0] = 0
    packed = new_packed(sum(each.numel() for each in rows), torch.float32, CPU)
    packed[:-1] = torch.cat([each.flatten() for each in rows])
    factors = _factors(shapes, torch.float32)
    factors.unit_rows(packed)
    got = _unpacked(factors, shapes)
    assert all(((each.norm(dim=1) - 1).abs() < 1e-6).all() for each in got)
    for one, unit in zip(rows, got, strict=True):
        first = int(one is rows[-1])
        assert torch.allclose(unit[first:], torch.nn.functional.normalize(one[first:], dim=1), atol=1e-6)
    assert packed[-1] == 0 and torch.equal(packed[:-1], torch.cat([each.flatten() for each in rows]))


def test_dependent_rows_are_replaced_in_their_matrix_alone() -> None:
    shapes = SHAPES["several ranks"]
    rows = _rows(shapes, torch.float32)
    rows[0][3] = rows[0][1]
    rows[3].zero_()
    factors = _factors(shapes, torch.float32)
    factors.orthonormalise(torch.cat([each.flatten() for each in rows]), torch.ones(4, dtype=torch.bool))
    for one, basis in zip(rows, _unpacked(factors, shapes), strict=True):
        assert (basis @ basis.T - torch.eye(len(basis))).abs().max() < 1e-6
        assert (one - one @ basis.T @ basis).abs().max() < 1e-5


def test_which_factors_share_a_tensor() -> None:
    """Memory stays within four times that of the factors, whatever their lengths."""

    def groups(lengths: list[int]) -> list[list[int]]:
        return [group.members for group in _factors([(2, n) for n in lengths], torch.float32)._groups]

    assert groups([768, 3072, 768]) == [[0, 2, 1]]
    assert groups([50_257, 768, 768, 3072, 768]) == [[1, 2, 4, 3], [0]]
    assert groups([10, 1000, 20]) == [[0, 2, 1]]  # small ones always
    assert groups([10_000, 20_000]) == [[0, 1]]
    assert groups([1000, 1000, 1000, 1000, 16_000]) == [[0, 1, 2, 3, 4]]  # five rows of 16,000 are four times as long
    assert groups([1000, 1000, 1000, 1000, 16_001]) == [[0, 1, 2, 3], [4]]
    shapes = [(r, n) for r in (1, 4, 16) for n in (64, 5000, 20_000, 100_000)]
    padded = sum(torch.Size(group.shape).numel() for group in _factors(shapes, torch.float32)._groups)
    assert padded < 4 * 16 * sum(n for _, n in shapes)
