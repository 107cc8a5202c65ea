"""Translates the arguments by which Accelerate's own handler selects one of torch's hooks."""

from collections.abc import Iterable
from typing import Any

from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType

from accelerate_commhooks.yaml_settings import STOCK_HOOK_FIELDS
from commhooks import HookConfigError
from commhooks.hook.plugin_api import check_choice

_NO = DDPCommunicationHookType.NO


def given_in(handler: DistributedDataParallelKwargs) -> list[str]:
    """Return which of `STOCK_HOOK_FIELDS` select something."""
    return [
        name for name in STOCK_HOOK_FIELDS if getattr(handler, name) not in (_NO, "no", None, {})
    ]


def translated(handler: Any) -> dict[str, Any]:
    """Return the arguments of commhooks that select the same hook; {} if nothing is selected.

    Raises HookConfigError for an unknown one, and beside `hook`, `hook_options` or `wrapper` of the
    `CommHookKwargs`.
    """
    stock = given_in(handler)
    if not stock:
        return {}
    if any(getattr(handler, name) is not None for name in ("hook", "hook_options", "wrapper")):
        ours = "hook" if handler.hook is not None else "hook_options or wrapper"
        raise HookConfigError(
            f"{' and '.join(stock)} together with {ours}=: both set a communication hook, and DDP"
            " takes only one. Keep hook= (with hook_options= and wrapper=)"
        )
    wrappers = (_NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)
    hook = _chosen("comm_hook", handler.comm_hook, DDPCommunicationHookType)
    wrapper = _chosen("comm_wrapper", handler.comm_wrapper, wrappers)
    if hook is None:
        argument = "comm_wrapper" if wrapper is not None else "comm_state_option"
        raise HookConfigError(f"{argument} without comm_hook: no communication hook is set")
    return {"hook": hook, "hook_options": handler.comm_state_option or None, "wrapper": wrapper}


def _chosen(name: str, value: Any, allowed: Iterable[DDPCommunicationHookType]) -> str | None:
    text = getattr(value, "value", value)
    if text is not None:
        check_choice(name, text, tuple(choice.value for choice in allowed))
    return None if text == _NO.value else text
