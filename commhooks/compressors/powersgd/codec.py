"""The low-rank codec: pure tensor mathematics, no communication.

Letters as in the paper (Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, Algorithm 1). Factors are kept transposed,
`P` as r x n and `Q` as r x m: the thin products are then several times faster on CPU. A factor of rank 1 is padded to
two rows with a row of zeros, because products with a single row take another path in the BLAS whose bits depend on the
alignment of memory.
"""

import hashlib
from collections.abc import Iterator

import torch

Factors = tuple[torch.Tensor, torch.Tensor]


def new_factor(rank: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zero factor of `rank` rows (two at least), `length` columns, in memory of its own."""
    return torch.zeros(max(rank, 2), length, dtype=dtype, device=device)


def draw(seed: int, name: str, purpose: str, rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers, `rank x length`, on the CPU; the same on every rank and for every bucket layout."""
    digest = hashlib.sha256(f"{seed}\0{name}\0{purpose}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(rank, length, generator=generator, dtype=dtype)


def unit_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row of `rows` (r x k) to norm 1 and tell which rows are zero (r x 1, bool); they stay zero.

    In two steps, because the square of 1e30 overflows and that of 1e-38 vanishes in float32.
    """
    largest = rows.abs().amax(1, keepdim=True)  # vector_norm(inf) with a dim is seven times slower on CPU
    missing = largest == 0
    scaled = rows / torch.where(missing, torch.ones_like(largest), largest)
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / torch.where(missing, torch.ones_like(norm), norm), missing


def orthonormal_rows(rows: torch.Tensor, refill: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthonormalise `rows` (r x k, r <= k): returns the basis (r x k) and which directions were missing (r, bool).

    A direction is missing where it adds nothing to the ones before it. Householder QR gives an orthonormal column there
    too, but an arbitrary one made of rounding errors; with `refill` (r x k, any independent rows) the missing ones are
    taken from there instead and everything is orthonormalised again, without asking the host which they are.
    Numbers that are not finite count as zero.
    """
    rows = torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    basis, triangle = torch.linalg.qr(unit_rows(rows)[0].t())
    missing = triangle.diagonal().abs() <= 10 * torch.finfo(rows.dtype).eps
    if refill is not None:
        basis, _ = torch.linalg.qr(torch.where(missing, unit_rows(refill)[0].t(), basis))
    return basis.t(), missing


# A row that adds less than a hundredth of its length to those before it gets this much of another direction.
_WEAK, _NUDGE = 1e-4, 1e-6


def orthonormal_stack(rows: torch.Tensor, refill: torch.Tensor) -> torch.Tensor:
    """`orthonormal_rows` for a stack, on an accelerator: some 40 kernels whatever k and r are.

    Shifted Cholesky QR in float64, four times (Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa: Shifted Cholesky QR
    for computing the QR factorization of ill-conditioned matrices, SIAM J. Sci. Comput. 2020). Rows that are dependent
    are not found reliably from their Gram matrix, and need not be: whatever may be is nudged towards `refill`, which
    makes it independent. A row turns by 1e-6 at most; what a weak one adds to the others, a direction of length e, by
    1e-6 / e.

    Args:
        rows: k x r x n; numbers that are not finite count as zero.
        refill: k x r x n, rows of norm 1, drawn at random: none of them is by chance a combination of `rows`.

    Returns:
        k x r x n in float64.
    """
    rows, _ = unit_stack(torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0))
    triangle, failed = _triangle(rows)
    weak = (triangle.diagonal(dim1=1, dim2=2).square() < _WEAK) | (failed != 0).unsqueeze(-1)
    rows, _ = unit_stack(torch.where(weak.unsqueeze(-1), torch.add(rows, refill, alpha=_NUDGE), rows))
    for _ in range(4):
        rows = torch.linalg.solve_triangular(_triangle(rows)[0], rows, upper=False)
    return rows


def _triangle(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """L (k x r x r, lower) with L L^T = rows rows^T, and where there is none (k, not 0). The shift keeps rounding from
    making it indefinite. `cholesky` instead of `cholesky_ex` would make the host wait to see whether it is."""
    gram = torch.bmm(rows, rows.transpose(1, 2))
    gram.diagonal(dim1=1, dim2=2).add_(1e-13 * rows.shape[1])
    return torch.linalg.cholesky_ex(gram)


def unit_stack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`unit_rows` for a stack (k x r x n) with fewer kernels: in float64 no square of a float32 overflows."""
    rows = rows.double()
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / norm.clamp_min(1e-300), norm == 0


def add_and_project(
    delta: torch.Tensor, residual: torch.Tensor | None, factor: float, q: torch.Tensor, rank: int, out: torch.Tensor
) -> None:
    """delta += factor * residual in place, then P = delta Q.

    `delta` and `residual` n x m, `q` r x m (transposed Q), `out` r x n (transposed P); of a padded factor `rank` rows
    count.
    """
    if residual is not None:
        delta.add_(residual, alpha=factor)
    project_p(delta, q, out)


def project_p(delta: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """P = delta Q. `delta` n x m, `q` r x m (transposed Q), `out` r x n (transposed P)."""
    torch.mm(q, delta.t(), out=out)


def project_q(delta: torch.Tensor, p: torch.Tensor, rank: int, out: torch.Tensor) -> None:
    """Q = delta^T P. `delta` n x m, `p` r x n (transposed P), `out` r x m (transposed Q)."""
    torch.mm(p, delta, out=out)


def split(delta: torch.Tensor, local: Factors, mean: Factors, rank: int, residual: torch.Tensor) -> None:
    """residual = delta - P Q^T with the factors (P, Q) of this rank, then delta = P Q^T with those of all ranks."""
    remainder(delta, *local, rank, out=residual)
    reconstruct(*mean, rank, out=delta)


def reconstruct(p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor) -> None:
    """P Q^T into `out` (n x m)."""
    if rank > _OUTER_RANK or out.device.type != "cpu":
        torch.mm(p[:rank].t(), q[:rank], out=out)
        return
    for rows in _row_blocks(out):
        block = out[rows]
        torch.mul(p[0, rows, None], q[0], out=block)
        for k in range(1, rank):
            block.addcmul_(p[k, rows, None], q[k])


def remainder(delta: torch.Tensor, p: torch.Tensor, q: torch.Tensor, rank: int, out: torch.Tensor) -> None:
    """delta - P Q^T into `out` (n x m), which may be `delta` itself."""
    if rank > _OUTER_RANK or out.device.type != "cpu":
        torch.addmm(delta, p[:rank].t(), q[:rank], alpha=-1, out=out)
        return
    for rows in _row_blocks(out):
        block = out[rows]
        torch.addcmul(delta[rows], p[0, rows, None], q[0], value=-1, out=block)
        for k in range(1, rank):
            block.addcmul_(p[k, rows, None], q[k], value=-1)


# On CPU a few outer products are faster than a matrix product over so short a sum, and need no padding: their bits
# never depend on the alignment of memory. Block by block, so that the later ones find the block in the cache.
_OUTER_RANK = 4
_BLOCK_NUMEL = 2**18


def _row_blocks(matrix: torch.Tensor) -> Iterator[slice]:
    n, m = matrix.shape
    height = max(1, _BLOCK_NUMEL // m)
    return (slice(begin, min(begin + height, n)) for begin in range(0, n, height))
