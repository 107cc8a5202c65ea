"""DiLoCo as the paper has it, in plain torch, for readers and tests: algorithm 1 of Douillard et al., 2023.

The fast form (`outer_step.py`) works in place, on buffers, over real ranks, and may quantise what it sends.
"""

from collections.abc import Sequence

import torch


class ReferenceDiLoCo:
    """The outer optimizer of any number of ranks in one process, in float64.

    Args:
        weights: the initial weights of the model, of any shape.

    Attributes:
        anchor: the weights with which all ranks begin a round.
        momentum: the momentum of the outer optimizer.
    """

    def __init__(self, weights: torch.Tensor, outer_lr: float, outer_momentum: float) -> None:
        self.anchor = weights.double()
        self.momentum = torch.zeros_like(self.anchor)
        self._lr, self._mu = outer_lr, outer_momentum

    def step(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """One outer step. `weights`: the weights of each rank. Returns the new anchor."""
        differences = [self.anchor - each for each in weights]
        outer_gradient = torch.stack(differences).mean(0)
        self.momentum = self._mu * self.momentum + outer_gradient
        self.anchor = self.anchor - self._lr * (outer_gradient + self._mu * self.momentum)  # Nesterov
        return self.anchor
