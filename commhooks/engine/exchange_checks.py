"""Check what a compressor's exchange yields and returns, so that errors name the compressor."""

from typing import Any

import torch

from commhooks.compressors.base import Exchange, Send, Verdict
from commhooks.errors import HookRunError


def checked_exchange(made: Any, name: str) -> Exchange:
    """Return `made`, the result of `Compressor.exchange`, if it is a generator; raise HookRunError otherwise."""
    if not (callable(getattr(made, "send", None)) and callable(getattr(made, "close", None))):
        raise HookRunError(
            f"the exchange of {name} is a {type(made).__name__}, not a generator: it must yield its collectives (Send)"
        )
    exchange: Exchange = made
    return exchange


def checked_yield(yielded: Any, name: str) -> Send | Verdict:
    """Return `yielded` if the engine can act on it; raise HookRunError otherwise."""
    if isinstance(yielded, Send):
        return yielded
    if not isinstance(yielded, Verdict):
        raise HookRunError(f"the exchange of {name} yields a {type(yielded).__name__}; expected Send or Verdict")
    finite: Any = yielded.finite
    if not (isinstance(finite, torch.Tensor) and finite.dim() == 0 and finite.dtype == torch.bool):
        raise HookRunError(
            f"the exchange of {name} yields Verdict({finite!r}); expected a bool tensor without dimensions, such as "
            "reduced.isfinite().all()"
        )
    return yielded


def checked_result(value: Any, name: str, flat: torch.Tensor) -> torch.Tensor:
    """Return `value`, the result of an exchange, as the result of the bucket `flat` (None: the bucket itself); raise
    HookRunError if it is not a tensor of the bucket's shape."""
    if value is None:
        return flat
    if not isinstance(value, torch.Tensor) or (not flat.is_sparse and value.shape != flat.shape):
        what = f"a {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            what = f"a tensor of shape {tuple(value.shape)}"
        raise HookRunError(
            f"the exchange of {name} returns {what}; expected None, with the result in the bucket, or a tensor of "
            f"shape {tuple(flat.shape)}"
        )
    return value
