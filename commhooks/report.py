"""What a hook reports of itself: status, summary, and norms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Use:
    """Says what a hook has done so far. It begins at step `begins`, or later if `or_later` says so.

    Attributes:
        acted: whether the hook has compressed a step or averaged weights.
        plain: whether the latest step was a plain all-reduce because the hook has not begun.
        acts: the first step at which it compresses or averages; usually equal to `begins`.
        missing: what the hook has not done, for the warning that it had no effect.
        why: why the hook may not act although it has begun, for the same warning.
        remedy: how to make the hook begin earlier.
    """

    acted: bool
    plain: bool = False
    begins: int = 0
    acts: int = 0
    missing: str = "compressed nothing"
    why: str = ""
    remedy: str = ""
    or_later: str = ""


@dataclass(frozen=True)
class Status:
    """Holds the current state of a hook, read without waiting for an accelerator.

    Attributes:
        use: None for plain averages, and without a hook.
        counts_bytes: whether the number of sent bytes is known.
        counts_outcomes: whether the numbers of committed and compressed steps are known.
        replicas_agree: whether the weights should now be equal on all ranks.
    """

    options: dict[str, Any]
    use: Use | None = Use(acted=True)
    counts_bytes: bool = False
    counts_outcomes: bool = False
    replicas_agree: bool = True
    run_number: int | None = None


@dataclass(frozen=True)
class Summary:
    """Holds the parts of the line that rank 0 logs after the first backward pass. `details`: the
    main options, the kernel, the nodes. `alone`: appended if a single rank sends nothing: what the
    hook does nevertheless. None: that is no news.
    """

    details: Sequence[str] = ()
    effect: str = ""
    alone: str | None = ""
    warnings: Sequence[str] = ()


@torch.no_grad()
def norms(
    gradients: Mapping[str, torch.Tensor | None],
    residuals: Mapping[str, torch.Tensor],
    factor: float,
) -> dict[str, float | None]:
    """Return the Euclidean norms over the parameters in `gradients`, and their ratio.

    The ratio says about how many steps' worth of gradient error feedback holds back. A value is
    None if there is nothing to measure. `factor`: the factor by which `residuals` are scaled.
    Synchronises with the device once.
    """
    held = [residuals[name] for name in gradients if name in residuals]
    tensors = held + [gradient for gradient in gradients.values() if gradient is not None]
    numbers = _norms_of(tensors)
    residual = math.hypot(*(norm / factor for norm in numbers[: len(held)])) if held else None
    gradient = math.hypot(*numbers[len(held) :]) if len(held) < len(numbers) else None
    ratio = residual / gradient if residual is not None and gradient else None
    return {"residual_norm": residual, "gradient_norm": gradient, "residual_over_gradient": ratio}


def _norms_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    if not tensors:
        return []
    norms = []
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        norms.append(torch.linalg.vector_norm(values).double())
    numbers: list[float] = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    return numbers
