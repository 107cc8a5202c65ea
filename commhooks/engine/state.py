"""Learned state: what a hook remembers from step to step, and all that a checkpoint has to hold."""

from dataclasses import dataclass, field, replace

import torch

from commhooks.gradients.loss_scale import LossScale


@dataclass
class Memory:
    """Keyed by names, never by places in a bucket.

    Attributes:
        step: committed synchronised backward passes, the same on every rank.
        nonfinite_steps: passes that were not committed.
        q: per matrix, Q transposed, `r x m` (float32 or float64); the same on every rank.
        p: per matrix, P transposed, `r x n`; only where P and Q alternate. The same on every rank.
        p_is_newer: matrices whose P is of the latest step, and whose Q is of the step before it.
        residuals: per parameter, flat in memory order (float32 or float64); each rank has its own. A missing entry is
            a residual of zeros.
        loss_scale: the factor by which the loss, and therefore the residuals, were multiplied; on an accelerator a
            tensor until somebody asks.
        residual_missing: this rank should have a residual and has none, so that all ranks must do without.
        missing_was_said: a warning has told of it.
        residuals_shared: every rank has the same residuals: the mean that was just saved or loaded, or none at all.
    """

    step: int = 0
    nonfinite_steps: int = 0
    q: dict[str, torch.Tensor] = field(default_factory=dict)
    p: dict[str, torch.Tensor] = field(default_factory=dict)
    p_is_newer: set[str] = field(default_factory=set)
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_scale: LossScale = 1.0
    residual_missing: bool = False
    missing_was_said: bool = False
    residuals_shared: bool = True

    def apart(self) -> "Memory":
        """The same in tensors that own their memory: pickled, the slice of a stack would bring all of it along."""
        return replace(self, q=_apart(self.q), residuals=_apart(self.residuals))

    def forget_factors(self) -> None:
        self.q.clear()
        self.p.clear()
        self.p_is_newer.clear()

    def drop_residuals(self) -> None:
        self.residuals.clear()
        self.residual_missing = False
        self.residuals_shared = True


def _apart(entries: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for n, t in entries.items()}
