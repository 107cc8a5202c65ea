"""Implement DiLoCo in plain torch, for readers and tests: algorithm 1 of Douillard et al., 2023.

`outer_step.py` computes the same in place, on buffers, over real ranks, and may quantise what it
sends.
"""

from collections.abc import Sequence

import torch


class ReferenceDiLoCo:
    """Runs the outer steps of any number of ranks in one process, in float64.

    Attributes:
        anchor: the weights with which all ranks begin a round.
        momentum: the momentum of the outer optimizer.
    """

    def __init__(self, weights: torch.Tensor, outer_lr: float, outer_momentum: float) -> None:
        self.anchor = weights.double()
        self.momentum = torch.zeros_like(self.anchor)
        self._lr, self._mu = outer_lr, outer_momentum

    def step(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run an outer step, given the weights of all ranks. Return the new anchor."""
        delta = torch.stack([self.anchor - theta for theta in weights]).mean(0)
        self.momentum = self._mu * self.momentum + delta
        self.anchor = self.anchor - self._lr * (delta + self._mu * self.momentum)  # Nesterov
        return self.anchor
