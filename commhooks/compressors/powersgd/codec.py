"""PowerSGD's mathematics of single factors and matrices: no communication, no state.

Notation as in the paper (Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, Algorithm 1). Factors are kept transposed,
`P` as r x n and `Q` as r x m: the thin products are then several times faster on CPU.
"""

import hashlib
from collections.abc import Callable, Iterator

import torch


def draw(seed: int, name: str, purpose: str, rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers, `rank x length`, on the CPU; equal on every rank and for every bucket layout."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(rank, length, generator=generator, dtype=dtype)


def unit_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row of `rows` (r x k) to norm 1. Returns the result and which rows are zero (r x 1, bool); zero rows
    stay zero.

    Divides by the largest element first, because in float32 the square of 1e30 overflows and that of 1e-38 is 0.
    """
    largest = rows.abs().amax(1, keepdim=True)  # vector_norm(inf) with a dim is seven times slower on CPU
    missing = largest == 0
    scaled = rows / torch.where(missing, torch.ones_like(largest), largest)
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / torch.where(missing, torch.ones_like(norm), norm), missing


def orthonormal_rows(rows: torch.Tensor, refill: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormalise `rows` (r x k, r <= k). Returns the basis (r x k) and which rows were dependent (r, bool).

    A row is dependent if it is a combination of the rows before it. Householder QR then yields an orthonormal column
    too, but an arbitrary one made of rounding errors. With `refill` (r x k, any independent rows) dependent rows are
    replaced by rows of `refill` and all are orthonormalised again, without synchronising with an accelerator.
    Non-finite numbers count as zero.
    """
    rows = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    basis, triangle = torch.linalg.qr(unit_rows(rows)[0].t())
    missing = triangle.diagonal().abs() <= 10 * torch.finfo(rows.dtype).eps
    if refill is not None:
        basis, _ = torch.linalg.qr(torch.where(missing, unit_rows(refill)[0].t(), basis))
    return basis.t(), missing


def filled_unit_rows(rows: torch.Tensor, refill: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`unit_rows` on the CPU, with those of `refill` in the places of zero rows."""
    unit, missing = unit_rows(rows)
    return torch.where(missing, unit_rows(refill())[0], unit) if missing.any() else unit


def basis(rows: torch.Tensor, refill: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`orthonormal_rows` on the CPU, which draws `refill` only where rows are dependent."""
    found, missing = orthonormal_rows(rows, None)
    return orthonormal_rows(rows, refill())[0] if missing.any() else found


# A row is weak if less than 1/100 of its norm is independent of the rows before it. `_NUDGE` times
# a random row is added to it.
_WEAK, _NUDGE = 1e-2, 1e-6


def orthonormal_stack(rows: torch.Tensor, refill: torch.Tensor) -> torch.Tensor:
    """`orthonormal_rows` for a stack on an accelerator: about 40 kernels, independent of k and r.

    Shifted Cholesky QR in float64, four times (Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa: Shifted Cholesky QR
    for computing the QR factorization of ill-conditioned matrices, SIAM J. Sci. Comput. 2020). The Gram matrix does not
    show dependent rows reliably. Therefore every row that may be dependent gets 1e-6 times a row of `refill` added,
    which makes it independent. This turns a row by an angle of 1e-6 at most; it turns the component that a weak row
    adds to the others, of norm e, by about 1e-6 / e.

    Args:
        rows: k x r x n; non-finite numbers count as zero.
        refill: k x r x n, random rows of norm 1, independent of `rows` with probability 1.

    Returns:
        k x r x n in float64.
    """
    rows, _ = unit_stack(torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0))
    triangle, failed = _triangle(rows)
    weak = (triangle.diagonal(dim1=1, dim2=2) < _WEAK) | (failed != 0).unsqueeze(-1)
    rows, _ = unit_stack(rows.addcmul_(refill, weak.unsqueeze(-1), value=_NUDGE))
    for _ in range(3):
        rows = torch.linalg.solve_triangular(_triangle(rows)[0], rows, upper=False)
    return rows


def _triangle(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The Cholesky factor L (k x r x r, lower triangular) of rows rows^T, and LAPACK's info (k; 0 means success). The
    shift keeps rounding from making the Gram matrix indefinite. `cholesky_ex` is used because `cholesky` synchronises
    with the device to check for failure."""
    gram = torch.bmm(rows, rows.transpose(1, 2))
    gram.diagonal(dim1=1, dim2=2).add_(1e-13 * rows.shape[1])
    return torch.linalg.cholesky_ex(gram)


def unit_stack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`unit_rows` for a stack (k x r x n) with fewer kernels, in float64, where no square of a float32 overflows."""
    rows = rows.double()
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / norm.clamp_min(1e-300), norm == 0


def reconstruct(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Write P Q^T into `out` (n x m). `p` r x n, `q` r x m."""
    if len(p) > _OUTER_RANK or out.device.type != "cpu":
        torch.mm(p.t(), q, out=out)
        return
    for rows in _row_blocks(out):
        block = out[rows]
        torch.mul(p[0, rows, None], q[0], out=block)
        for k in range(1, len(p)):
            block.addcmul_(p[k, rows, None], q[k])


def remainder(delta: torch.Tensor, p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Write delta - P Q^T into `out` (n x m), which may be `delta` itself."""
    if len(p) > _OUTER_RANK or out.device.type != "cpu":
        torch.addmm(delta, p.t(), q, alpha=-1, out=out)
        return
    for rows in _row_blocks(out):
        block = out[rows]
        torch.addcmul(delta[rows], p[0, rows, None], q[0], value=-1, out=block)
        for k in range(1, len(p)):
            block.addcmul_(p[k, rows, None], q[k], value=-1)


# On CPU, up to this rank, r outer products are faster than a matrix product and need no padding: their bits do not
# depend on the alignment of memory. They run block by block, so that each block stays in the cache.
_OUTER_RANK = 4
_BLOCK_NUMEL = 2**18


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    n, m = matrix.shape
    height = max(1, _BLOCK_NUMEL // m)
    return (slice(begin, min(begin + height, n)) for begin in range(0, n, height))
