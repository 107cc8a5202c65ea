"""Measure which share of its gradient's energy each rank keeps, per layer."""

import torch

from commhooks.compressors.auto.ranks import LARGEST
from commhooks.compressors.base import State
from commhooks.gradients.layout import BucketLayout


class Energies:
    """Means over the gradients that it looks at. A `Look` for the rehearsal of PowerSGD at rank `LARGEST` without error
    feedback: with orthonormal P, Q = gradient^T P has the singular values of the approximated gradient."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}

    def look(self, layout: BucketLayout, gradient: torch.Tensor, state: State) -> None:
        """Add the layers of one bucket."""
        learned = state["q"]
        if not bool(gradient.isfinite().all()):
            return
        for slot in layout.slots:
            q = learned.get(slot.name)
            if q is None:  # not compressed
                continue
            energy = torch.linalg.vector_norm(slot.of(gradient), dtype=torch.float64).square()
            if not bool(energy > 0):
                continue
            squares = torch.linalg.svdvals(q.double()).square()
            shares = (squares.cumsum(0) / energy).clamp(0, 1).cpu()
            self._sums[slot.name] = self._sums.get(slot.name, 0) + shares
            self._counts[slot.name] = self._counts.get(slot.name, 0) + 1

    def numbers(self, names: list[str]) -> list[float]:
        """`LARGEST` shares for each of these layers, flat. A layer that was not seen keeps nothing at any rank; a layer
        that has fewer ranks keeps with higher ones what it keeps with its highest."""
        found: list[float] = []
        for name in names:
            shares = [0.0]
            if name in self._sums:
                shares = (self._sums[name] / self._counts[name]).tolist()
            found += [*shares, *[shares[-1]] * (LARGEST - len(shares))]
        return found


def by_layer(numbers: list[float], names: list[str]) -> dict[str, list[float]]:
    """The inverse of `Energies.numbers`."""
    return {name: numbers[LARGEST * place : LARGEST * (place + 1)] for place, name in enumerate(names)}
