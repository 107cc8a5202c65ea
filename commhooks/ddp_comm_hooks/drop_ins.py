"""Map each drop-in function to its hook: `attach` with such a function and no state attaches the hook of that name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commhooks.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook


@dataclass(frozen=True)
class DropIn:
    """A drop-in function with its hook name and the required type of its state (None: a process group)."""

    hook_name: str
    state_class: type | None = None


DROP_INS: dict[Callable[..., Any], DropIn] = {
    default_hooks.allreduce_hook: DropIn("allreduce"),
    default_hooks.fp16_compress_hook: DropIn("fp16_compress"),
    default_hooks.bf16_compress_hook: DropIn("bf16_compress"),
    debugging_hooks.noop_hook: DropIn("noop"),
    powerSGD_hook.powerSGD_hook: DropIn("powerSGD", powerSGD_hook.PowerSGDState),
    powerSGD_hook.batched_powerSGD_hook: DropIn("batched_powerSGD", powerSGD_hook.PowerSGDState),
}
