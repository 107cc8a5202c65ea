"""Measure which share of its gradient's energy each rank keeps, per layer."""

from collections.abc import Mapping

import torch

from commhooks.compressors.auto.ranks import LARGEST

POWER_ITERATIONS = 3


def kept_energy(matrix: torch.Tensor) -> torch.Tensor | None:
    """The shares of its energy that the best approximations of rank 1, 2, ..., at most `LARGEST`, keep, by power
    iterations; 1-D, on the CPU. None for a matrix of zeros, or one that is not finite."""
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    if not (bool(norm.isfinite()) and norm > 0):
        return None
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32)) / norm
    rank = min(*matrix.shape, LARGEST)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(matrix.shape[1], rank, generator=generator).to(matrix)
    for _ in range(POWER_ITERATIONS):
        p = torch.linalg.qr(matrix @ q).Q
        q = matrix.T @ p
    # With orthonormal P, Q has the singular values of the approximation P Q^T.
    return torch.linalg.svdvals(q.double()).square().cumsum(0).clamp(0, 1).cpu()


class Energies:
    """Means over the gradients that it looks at."""

    def __init__(self) -> None:
        self._shares: dict[str, list[torch.Tensor]] = {}

    def look(self, matrices: Mapping[str, torch.Tensor]) -> None:
        """Add the gradients of some layers, by name, as matrices."""
        for name, matrix in matrices.items():
            shares = kept_energy(matrix)
            if shares is not None:
                self._shares.setdefault(name, []).append(shares)

    def numbers(self, names: list[str]) -> list[float]:
        """`LARGEST` shares for each of these layers, flat. A layer that was not seen keeps nothing at any rank; a layer
        that has fewer ranks keeps with higher ones what it keeps with its highest."""
        found: list[float] = []
        for name in names:
            seen = self._shares.get(name, [torch.zeros(1)])
            shares = torch.stack(seen).mean(0).tolist()
            found += [*shares, *[shares[-1]] * (LARGEST - len(shares))]
        return found


def by_layer(numbers: list[float], names: list[str]) -> dict[str, list[float]]:
    """The inverse of `Energies.numbers`."""
    return {name: numbers[LARGEST * place : LARGEST * (place + 1)] for place, name in enumerate(names)}
