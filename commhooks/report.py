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
    """Return the Euclidean norms over the parameters in `gradients`, and their ratio: about how
    many steps' worth of gradient error feedback holds back. A value is None if there is nothing to
    measure. `factor`: the factor by which `residuals` are scaled. Synchronises with the device
    once.
    """
    held = [residuals[name] for name in gradients if name in residuals]
    tensors = held + [each for each in gradients.values() if each is not None]
    values = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    found = [torch.linalg.vector_norm(each).double() for each in values]
    read = torch.stack([each.to(found[0].device) for each in found]).tolist() if found else []
    residual = math.hypot(*(norm / factor for norm in read[: len(held)])) if held else None
    gradient = math.hypot(*read[len(held) :]) if len(held) < len(read) else None
    ratio = residual / gradient if residual is not None and gradient else None
    return {"residual_norm": residual, "gradient_norm": gradient, "residual_over_gradient": ratio}
