"""Norms of residuals and gradients, computed on request from existing tensors, never in a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Norms:
    """Euclidean norms; None if there is nothing to measure."""

    residual: float | None
    gradient: float | None

    @property
    def ratio(self) -> float | None:
        """Residual norm / gradient norm: about how many steps of gradient error feedback holds back."""
        if self.residual is None or not self.gradient:
            return None
        return self.residual / self.gradient

    @classmethod
    def total(cls, parts: "list[Norms]") -> "Norms":
        """The norms over all parts together."""
        return cls(_together([part.residual for part in parts]), _together([part.gradient for part in parts]))

    def as_dict(self) -> dict[str, float | None]:
        """The norms by their public names."""
        return {
            "residual_norm": self.residual,
            "gradient_norm": self.gradient,
            "residual_over_gradient": self.ratio,
        }


@torch.no_grad()
def measure(
    gradients: Mapping[str, torch.Tensor | None], residuals: Mapping[str, torch.Tensor], factor: float
) -> dict[str, Norms]:
    """The norms per parameter, for those in `gradients`. `residuals`: 1-D, multiplied by `factor`.

    Synchronises with the device once.
    """
    found: list[torch.Tensor] = []

    def place(tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        norm = torch.linalg.vector_norm(values).double()
        found.append(norm.to(found[0].device) if found else norm)
        return len(found) - 1

    places = {name: (place(residuals.get(name)), place(gradient)) for name, gradient in gradients.items()}
    values = torch.stack(found).tolist() if found else []

    def norms(residual: int | None, gradient: int | None) -> Norms:
        return Norms(
            None if residual is None else values[residual] / factor,
            None if gradient is None else values[gradient],
        )

    return {name: norms(*where) for name, where in places.items()}


def _together(norms: list[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if known else None
