"""Says that the hook of a handler is attached to no model, at the latest before the first step.

Accelerate 1.15 never calls its handler for models that it shards or does not wrap.
"""

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, is_initialized
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from accelerate_commhooks.yaml_settings import LINE_TO_ADD
from commhooks import AttachError
from commhooks.errors import logger_of, print_error_on_rank_zero
from commhooks.hook.plugin_api import HookRequest

logger = logger_of(__name__)

CALL_ATTACH = "call handler.attach(accelerator) before accelerator.prepare(...)"


@print_error_on_rank_zero()
def raise_or_warn(request: HookRequest) -> None:
    """Raise AttachError if `CommHookKwargs.attach` was forgotten; otherwise log a warning."""
    kind = AcceleratorState().distributed_type
    start = f"hook {request.name!r} is attached to no model"
    if kind is DistributedType.FSDP:
        raise AttachError(
            f"{start}, and Accelerate (FSDP) averages the gradients without it: {CALL_ATTACH}"
        )
    if kind is not DistributedType.NO:
        logger.warning("%s, and training begins without it (%s). %s.", start, kind, LINE_TO_ADD)
    elif request.members is not None:
        raise AttachError(f"{start}, and this machine trains without the others: {CALL_ATTACH}")
    else:
        warn_alone(request)


def warn_alone(request: HookRequest) -> None:
    remedy = "Start the script with torchrun or accelerate launch for several ranks."
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    if processes > 1:
        remedy = (
            f"The launcher has started {processes} processes, and each trains alone: on CPUs pass"
            " Accelerator(cpu=True), or TrainingArguments(use_cpu=True)."
        )
    logger.warning(
        "%s: there is one rank, so nothing is sent. Accelerate does not wrap its model in DDP:"
        " there is no hook, and the gradients are exact. %s",
        request.name,
        remedy,
    )


# ---- before the first step
# -------------------------------------------------------------------------------------------

_checks: list["weakref.WeakMethod[Callable[[], bool]]"] = []


def call_before_step(check: Callable[[], bool]) -> None:
    """Call the bound method `check` before each step of any optimizer until it returns True.

    It is called once there is an `Accelerator`. Its object is not kept alive.
    """
    _watch_all_optimizers()
    _checks.append(weakref.WeakMethod(check))


@functools.cache
def _watch_all_optimizers() -> None:
    # Once per process and for good: torch 2.13 fails if a hook is removed while it calls hooks.
    register_optimizer_step_pre_hook(_before_step)


@torch.compiler.disable
def _before_step(optimizer: Optimizer, *arguments: Any) -> None:
    if _checks and is_initialized():
        # A check that raises stays, and raises again at the next step.
        _checks[:] = [
            method for method in _checks if (check := method()) is not None and not check()
        ]
