"""The fields of Accelerate's own `DistributedDataParallelKwargs` that request a hook of torch, for which the one of
commhooks is taken. Its other fields are DDP's arguments."""

import dataclasses
from typing import Any

from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType

from commhooks.errors import HookConfigError
from commhooks.hook.for_plugins import check_choice

STOCK_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")
DDP_FIELDS = [f for f in dataclasses.fields(DistributedDataParallelKwargs) if f.name not in STOCK_HOOK_FIELDS]
_NO = DDPCommunicationHookType.NO


def requests(handler: DistributedDataParallelKwargs) -> list[str]:
    """The names of the set fields that request a hook."""
    return [name for name in STOCK_HOOK_FIELDS if getattr(handler, name) not in (_NO, "no", None, {})]


def translated(handler: DistributedDataParallelKwargs) -> tuple[str, dict[str, Any] | None, str | None]:
    """`hook`, `hook_options` and `wrapper` of `CommHookKwargs` that correspond to the three fields."""
    hook = _choice("comm_hook", handler.comm_hook, list(DDPCommunicationHookType))
    wrappers = [_NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16]
    wrapper = _choice("comm_wrapper", handler.comm_wrapper, wrappers)
    if hook is None:
        given = "comm_wrapper" if wrapper is not None else "comm_state_option"
        raise HookConfigError(f"{given} without comm_hook: there is no communication hook that it could be for")
    return hook, handler.comm_state_option or None, wrapper


def _choice(name: str, value: Any, allowed: list[DDPCommunicationHookType]) -> str | None:
    """The name of an enum member, or the string itself; None for "no"."""
    text = getattr(value, "value", value)
    if text is not None:
        check_choice(name, text, tuple(choice.value for choice in allowed))
    return None if text == _NO.value else text
