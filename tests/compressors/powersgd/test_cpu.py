"""On the CPU bases are orthonormal, rows have norm 1, and draws depend on their key alone."""

import contextlib
import itertools
import platform
from typing import Any

import pytest
import torch

from commhooks.compressors.powersgd import exchange
from commhooks.compressors.powersgd.cpu import NativeProducts, TorchProducts, orthonormal_rows
from tests.support.compilers import another_library, needs_compiler

LENGTH = 40
RANKS = (1, 2, 3, 8, 16)


def _random(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rank, LENGTH, generator=torch.Generator().manual_seed(seed))


def _one_zero_row(rank: int) -> torch.Tensor:
    rows = _random(rank)
    rows[rank // 2] = 0
    return rows


INPUTS = {
    "random": _random,
    "zero": lambda rank: torch.zeros(rank, LENGTH),
    "constant": lambda rank: torch.full((rank, LENGTH), 3.0),
    "parallel": lambda rank: torch.arange(1.0, rank + 1)[:, None] * _random(1),
    "nearly parallel": lambda rank: _random(1) + 1e-6 * _random(rank, seed=1),
    "parallel to a unit vector": lambda rank: torch.eye(LENGTH)[:1].repeat(rank, 1),
    "one zero row": _one_zero_row,
    "1e-38": lambda rank: 1e-38 * _random(rank),
    "1e30": lambda rank: 1e30 * _random(rank),
    "all magnitudes": lambda rank: torch.logspace(-38, 36, rank)[:, None] * _random(rank),
    "zero and 1e30": lambda rank: 1e30 * _one_zero_row(rank),
    "inf": lambda rank: _random(rank).index_fill_(1, torch.tensor([3]), float("inf")),
    "NaN everywhere": lambda rank: torch.full((rank, LENGTH), float("nan")),
}


def _deviation(basis: torch.Tensor) -> float:
    """max |P P^T - I| in float64."""
    basis = basis.double()
    return float((basis @ basis.T - torch.eye(len(basis))).abs().max())


PLAIN = "plain"


def _products(
    kind: str, shapes: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32
) -> Any:
    """What works on factors and matrices: the plain form, or the native library."""
    return (TorchProducts if kind == PLAIN else NativeProducts)(shapes, dtype)


both = pytest.mark.parametrize("kind", [PLAIN, pytest.param("", marks=needs_compiler, id="native")])


def _basis(kind: str, rows: torch.Tensor, refill: torch.Tensor) -> torch.Tensor:
    rank, length = rows.shape
    products = _products(kind, [(length, length, rank)], rows.dtype)
    products.orthonormalize([rows], lambda i: refill)
    return products.p[0]


@both
@pytest.mark.parametrize("name", INPUTS)
def test_the_basis_is_orthonormal_whatever_comes_in(name, kind):
    for rank in RANKS:
        rows = INPUTS[name](rank)
        basis = _basis(kind, rows, exchange.draw(0, "w", "refill P", rank, LENGTH, torch.float32))
        assert basis.shape == (rank, LENGTH) and _deviation(basis) <= 1e-5


@both
@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e30])
def test_the_basis_spans_the_rows(scale, kind):
    rows = scale * _random(4)
    basis = _basis(kind, rows, torch.zeros(4, LENGTH)).double()  # no row is missing
    rows = rows.double() / scale
    # 1e-38 is below the smallest normal number of float32 and has lost some of its digits.
    assert (rows @ basis.T @ basis - rows).norm() / rows.norm() < (1e-2 if scale < 1e-30 else 1e-6)


@both
def test_missing_directions_are_found_and_refilled(kind):
    rows = _random(4)
    rows[2] = rows[0] + rows[1]
    rows[3] = 0
    assert orthonormal_rows(rows, None)[1].tolist() == [False, False, True, True]
    refill = _random(4, seed=5)
    basis = _basis(kind, rows, refill)
    together = torch.cat([rows[:2], refill[2:]])
    assert (together @ basis.T @ basis - together).norm() / together.norm() < 1e-5


@needs_compiler
@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_the_basis_is_orthonormal_in_float64(scale):
    rows = scale * torch.randn(
        5, LENGTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    rows[3] = 2 * rows[0] - rows[1]
    rows[4] *= 1e3
    basis = _basis("", rows, _random(5, seed=3).double())
    assert (basis @ basis.T - torch.eye(5)).abs().max() < 1e-13
    kept = rows[[0, 1, 2, 4]] / scale
    assert (kept @ basis.T @ basis - kept).norm() / kept.norm() < 1e-13
    products = _products("", [(LENGTH, LENGTH, 5)], torch.float64)
    products.unit_rows([rows], lambda i: rows)
    torch.testing.assert_close(products.q[0].norm(dim=1), torch.ones(5, dtype=torch.float64))


@both
def test_rows_have_norm_1(kind):
    rows = torch.stack(
        [_random(1)[0], 1e-38 * _random(1)[0], 1e30 * _random(1)[0], torch.zeros(LENGTH)]
    )
    products = _products(kind, [(LENGTH, LENGTH, 4), (LENGTH, LENGTH, 3)])
    products.unit_rows([rows, rows[:3]], lambda i: 5 * torch.eye(LENGTH)[:4])
    for scaled in products.q:
        torch.testing.assert_close(scaled.norm(dim=1), torch.ones(len(scaled)))
        torch.testing.assert_close(scaled[2], scaled[0])
    assert products.q[0][3].tolist() == torch.eye(LENGTH)[3].tolist()


def test_draws_depend_on_seed_name_and_purpose_only():
    def draw(seed=1, name="layer.weight", purpose="Q", dtype=torch.float32):
        return exchange.draw(seed, name, purpose, 3, 5, dtype)

    first = draw()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), before), (
        "the user's random numbers go on as if nothing was drawn"
    )
    others = [
        draw(seed=2),
        draw(name="layer.bias"),
        draw(purpose="refill Q"),
        draw(purpose="Q at step 1"),
    ]
    for other in others:
        assert not torch.equal(other, first)
    assert draw(dtype=torch.float64).dtype == torch.float64


def test_draws_stay_the_same_in_later_versions():
    """A run that resumes with a newer version must refill the same directions on every rank."""
    drawn = exchange.draw(0, "layer.weight", "Q", 2, 3, torch.float64)
    golden = [
        [1.5474703965416532, 1.035648890012991, -0.7766183194874987],
        [-1.8835038069749903, -0.6623888996956142, 1.459823782598064],
    ]
    torch.testing.assert_close(drawn, torch.tensor(golden, dtype=torch.float64), rtol=0, atol=1e-12)


SHAPES = [
    (7, 9),
    (1, 40),
    (40, 1),
    (64, 147),
    (33, 1500),
    (300, 16),
    (70, 512),
    (20, 9000),
    (700, 600),
]


SHORTER_VECTORS = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86_64")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (PLAIN, torch.float32),
        pytest.param("", torch.float32, marks=needs_compiler, id="native-float32"),
        pytest.param("", torch.float64, marks=needs_compiler, id="native-float64"),
        pytest.param("-mno-avx512f -O1", torch.float64, marks=[needs_compiler, SHORTER_VECTORS]),
        pytest.param("-mno-avx -O1", torch.float32, marks=[needs_compiler, SHORTER_VECTORS]),
    ],
    ids=str,
)
def test_products_are_those_of_plain_matrix_multiplication(kind, dtype):
    with contextlib.nullcontext() if kind in (PLAIN, "") else another_library(*kind.split()):
        for rank, shape in itertools.product([1, 2, 3, 5, 17], SHAPES):
            if rank <= min(shape):
                _compare_products(_products(kind, [(*shape, rank)], dtype), dtype, rank, *shape)


def _compare_products(products, dtype, rank, n, m):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    delta, residual = draw(n, m).to(dtype), draw(n, m).to(dtype)
    (p,), (q,) = products.p, products.q
    tolerance = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else 1e-13}

    def check(got, expected):
        scale = expected.abs().max()
        torch.testing.assert_close(got.double() / scale, expected / scale, **tolerance)

    q.copy_(draw(rank, m))
    before = delta.clone()
    expected = delta.double() + 0.25 * residual.double()
    products.form_p([delta], [residual.view(-1)], 0.25)
    largest = products.largest
    assert largest is None or largest.tolist() == [before.abs().max()]
    check(delta, expected)
    check(p.t(), expected @ q.double().t())
    p.fill_(7.0)
    products.form_p([delta], None, 0.25)
    check(delta, expected)
    check(p.t(), expected @ q.double().t())
    p.copy_(draw(rank, n))
    products.form_q([delta])
    check(delta, expected)
    check(q.t(), expected.t() @ p.double().t())
    left = expected - p.double().t() @ q.double()
    mean_q = draw(rank, m).to(dtype)
    products.reconstruct([0], [delta], [residual], [mean_q])
    check(residual, left)
    check(delta, p.double().t() @ mean_q.double())
    products.reconstruct([0], [delta], None, [q])
    check(delta, p.double().t() @ q.double())
    delta.copy_(expected)
    products.reconstruct([0], [delta], [delta], None)  # in place, and without the gradient
    check(delta, left)
