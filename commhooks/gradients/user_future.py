"""Check what a user's hook returns."""

from typing import Any

import torch

from commhooks.errors import HookRunError
from commhooks.gradients.torch_private import AnyFuture

_EXPECTED = (
    "it must return a torch.futures.Future that holds the reduced bucket, for example "
    "dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])"
)


def checked_future(returned: Any, hook_name: str) -> torch.futures.Future[torch.Tensor]:
    if not isinstance(returned, AnyFuture):
        raise HookRunError(f"hook {hook_name!r} returned a {type(returned).__name__}; {_EXPECTED}")
    return returned


def checked_value(value: Any, hook_name: str, numel: int) -> torch.Tensor:
    """Return `value`, the content of a hook's future, if it is a tensor of `numel` elements.

    Otherwise raise HookRunError. If a callback of the future raises it, backward raises a
    RuntimeError with the same text.
    """
    if not isinstance(value, torch.Tensor):
        raise HookRunError(
            f"the future of hook {hook_name!r} holds a {type(value).__name__}; {_EXPECTED}"
        )
    if value.numel() != numel:  # `copy_` would broadcast a single number over the bucket
        raise HookRunError(
            f"the future of hook {hook_name!r} holds {value.numel()} numbers for a bucket of"
            f" {numel}; {_EXPECTED}"
        )
    return value
