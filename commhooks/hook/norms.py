"""Norms of residuals and gradients, computed on request from existing tensors, never in a step."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Norms:
    """Euclidean norms; None if there is nothing to measure."""

    residual: float | None
    gradient: float | None

    def as_dict(self) -> dict[str, float | None]:
        """The norms by their public names, and their ratio: about how many steps of gradient error feedback holds
        back."""
        ratio = self.residual / self.gradient if self.residual is not None and self.gradient else None
        return {"residual_norm": self.residual, "gradient_norm": self.gradient, "residual_over_gradient": ratio}


def total(parts: Collection[Norms]) -> Norms:
    """The norms over all parts together."""
    residuals = [part.residual for part in parts if part.residual is not None]
    gradients = [part.gradient for part in parts if part.gradient is not None]
    return Norms(*(math.hypot(*known) if known else None for known in (residuals, gradients)))


@torch.no_grad()
def measure(
    gradients: Mapping[str, torch.Tensor | None], residuals: Mapping[str, torch.Tensor], factor: float
) -> dict[str, Norms]:
    """The norms per parameter, for those in `gradients`. `residuals`: 1-D, multiplied by `factor`.

    Synchronises with the device once.
    """
    tensors = {("residual", name): residuals[name] for name in gradients if name in residuals}
    tensors |= {("gradient", name): each for name, each in gradients.items() if each is not None}
    values = [each.coalesce().values() if each.is_sparse else each for each in tensors.values()]
    norms = [torch.linalg.vector_norm(each).double() for each in values]
    read = torch.stack([each.to(norms[0].device) for each in norms]).tolist() if norms else []
    found = dict(zip(tensors, read, strict=True))
    unscaled = {name: norm / factor for (what, name), norm in found.items() if what == "residual"}
    return {name: Norms(unscaled.get(name), found.get(("gradient", name))) for name in gradients}
