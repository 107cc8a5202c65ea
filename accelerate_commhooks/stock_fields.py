"""The fields of Accelerate's own `DistributedDataParallelKwargs`: DDP's arguments, and the three that request a hook of
torch, for which the one of commhooks is taken."""

import dataclasses
from typing import Any

from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType

from commhooks.errors import HookConfigError
from commhooks.hook.for_plugins import closest

STOCK_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")

_NO = DDPCommunicationHookType.NO


def ddp_arguments(handler: DistributedDataParallelKwargs) -> dict[str, Any]:
    """The arguments of `DistributedDataParallel`, by name."""
    names = [f.name for f in dataclasses.fields(DistributedDataParallelKwargs) if f.name not in STOCK_HOOK_FIELDS]
    return {name: getattr(handler, name) for name in names}


def requests(handler: DistributedDataParallelKwargs) -> list[str]:
    """The names of the set fields that request a hook."""
    return [name for name in STOCK_HOOK_FIELDS if getattr(handler, name) not in (_NO, "no", None, {})]


def translated(handler: DistributedDataParallelKwargs) -> tuple[str, dict[str, Any] | None, str | None]:
    """`hook`, `hook_options` and `wrapper` of `CommHookKwargs` that correspond to the three fields.

    Raises:
        HookConfigError: a name that Accelerate does not know, or a wrapper or options without a hook.
    """
    hook = _choice("comm_hook", handler.comm_hook, list(DDPCommunicationHookType))
    wrappers = [_NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16]
    wrapper = _choice("comm_wrapper", handler.comm_wrapper, wrappers)
    if hook is _NO:
        given = "comm_wrapper" if wrapper is not _NO else "comm_state_option"
        raise HookConfigError(f"{given} without comm_hook: there is no communication hook that it could be for")
    return hook.value, handler.comm_state_option or None, None if wrapper is _NO else wrapper.value


def _choice(name: str, value: Any, allowed: list[DDPCommunicationHookType]) -> DDPCommunicationHookType:
    values = [choice.value for choice in allowed]
    text = getattr(value, "value", value)
    if text is None:
        return _NO
    if text not in values:
        offer = closest(text, values) if isinstance(text, str) else ""
        raise HookConfigError(f"{name}={value!r}{offer}; expected one of {', '.join(map(repr, values))}")
    return DDPCommunicationHookType(text)
