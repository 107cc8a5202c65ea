"""What local steps say about a training, each once, and what they refuse."""

from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from commhooks.errors import HookRunError, log_summary, logger_of

logger = logger_of(__name__)


class Notices:
    """Logs what concerns all ranks on one of them. `logs`: whether this rank is the one."""

    def __init__(self, hook: str, *, logs: bool) -> None:
        self.logs = logs
        self._hook = hook
        self._said: set[str] = set()

    def outer_step_is_late(self, passes: int) -> None:
        self.warn_once(
            "no torch.optim optimizer has stepped all parameters since backward pass %s, so this"
            " outer step comes late, with the next forward or backward pass. Until then each rank"
            " has its own weights. Reasons: an optimizer that is not a torch.optim.Optimizer,"
            " several optimizers that take turns, backward passes that only accumulate gradients"
            " and are not in no_sync(), parameters in no optimizer, a step that was skipped, or a"
            " forward pass between the backward pass and the step.",
            passes,
        )

    def round_is_discarded(self, passes: int) -> None:
        self.warn_once(
            "the weights of at least one rank are not finite, so the round that ended after %s"
            " backward passes is discarded: all ranks go back to the weights from before it, and"
            " optimizers reset state that is not finite. stats()['nonfinite_steps'] counts such"
            " rounds.",
            passes,
        )

    def rate_is_multiplied(self, optimizer: Optimizer, factor: float) -> None:
        name = type(optimizer).__name__
        if self.logs and self._is_new(name):
            log_summary(
                f"{self._hook} multiplies the learning rate of {name} by {factor:.3g} in each step"
                " (lr_factor)"
            )

    def warn_once(self, text: str, *arguments: Any, on_every_rank: bool = False) -> None:
        if (self.logs or on_every_rank) and self._is_new(text):
            logger.warning("hook %s: " + text, self._hook, *arguments)

    def _is_new(self, text: str) -> bool:
        is_new = text not in self._said
        self._said.add(text)
        return is_new


def refuse_repeated_pass(hook: str, model: torch.nn.Module, **communicates: bool) -> None:
    """Raise HookRunError before a repeated pass of an optimizer step if passes communicate,
    because LBFGS may call its closure a different number of times on each rank. `communicates`: by
    what passes communicate, and whether this model uses it."""
    batch_norms = (
        module for module in model.modules() if isinstance(module, torch.nn.SyncBatchNorm)
    )
    communicates["SyncBatchNorm"] = any(module.training for module in batch_norms)
    for what, is_used in communicates.items():
        if is_used:
            raise HookRunError(
                f"hook {hook!r}: an optimizer calls its closure again within one step, as LBFGS "
                "does, and each rank may call it a different number of times. That cannot be "
                f"combined with {what}, which communicates in every backward pass: leave it out"
            )


def refuse_sharded_steps(optimizer: Optimizer) -> None:
    """Raise HookRunError for a ZeroRedundancyOptimizer, or one like it."""
    if hasattr(optimizer, "consolidate_state_dict"):
        raise HookRunError(
            f"{type(optimizer).__name__} steps each parameter on one rank only, with the gradient"
            " of that rank, but this hook averages weights, not gradients: use a plain optimizer,"
            " or shard the model by fully_shard"
        )
