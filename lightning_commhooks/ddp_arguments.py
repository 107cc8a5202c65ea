"""Check the arguments of a strategy that it hands on to `DDPStrategy` and `DistributedDataParallel`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from commhooks import HookConfigError
from commhooks.hook.for_plugins import unknown_argument

_OF_ANOTHER_HOOK = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
_NOT_FOR_USERS = {"self", "kwargs", "ddp_kwargs", "module", "device_ids"}


def check_ddp_arguments(hook: object, given: Mapping[str, Any], *takers: Callable[..., None]) -> None:
    """Raise HookConfigError for an argument in `given` that neither DDP nor one of `takers` has, or that sets another
    hook.

    Args:
        hook: the argument beside it, for the message.
        takers: the constructors of the strategy and of `DDPStrategy`.
    """
    for name in _OF_ANOTHER_HOOK:
        if given.get(name) is not None:
            raise HookConfigError(
                f"{name}= beside hook=: CommHookDDP attaches its own hook and DDP takes one only. Give your hook as "
                "hook= (with hook_state= and wrapper=); post-local SGD stays with Lightning's DDPStrategy"
            )
    takers = (*takers, DistributedDataParallel.__init__)
    known = {name for each in takers for name in inspect.signature(each).parameters} - _NOT_FOR_USERS
    for name, value in given.items():
        if name not in known:
            others = ", and neither have DDPStrategy and DistributedDataParallel; they know"
            raise unknown_argument("CommHookDDP", name, value, hook, known, others)
