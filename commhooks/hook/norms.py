"""Norms of residuals and gradients, computed on request from existing tensors, never in a step."""

import math
from collections.abc import Mapping

import torch


@torch.no_grad()
def measure(
    gradients: Mapping[str, torch.Tensor | None], residuals: Mapping[str, torch.Tensor], factor: float
) -> dict[str, float | None]:
    """The Euclidean norms over the parameters in `gradients`, by their public names, and their ratio: about how many
    steps of gradient error feedback holds back. None if there is nothing to measure. `residuals`: multiplied by
    `factor`.

    Synchronises with the device once.
    """
    held = [residuals[name] for name in gradients if name in residuals]
    tensors = held + [each for each in gradients.values() if each is not None]
    values = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    norms = [torch.linalg.vector_norm(each).double() for each in values]
    read = torch.stack([each.to(norms[0].device) for each in norms]).tolist() if norms else []
    residual = math.hypot(*(norm / factor for norm in read[: len(held)])) if held else None
    gradient = math.hypot(*read[len(held) :]) if len(held) < len(read) else None
    ratio = residual / gradient if residual is not None and gradient else None
    return {"residual_norm": residual, "gradient_norm": gradient, "residual_over_gradient": ratio}
