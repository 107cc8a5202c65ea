"""Detect when the optimizers of a model step, and multiply their learning rate during a step."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commhooks.errors import HookRunError


class OptimizerSteps:
    """Watches all torch optimizers for steps of the model's parameters.

    Args:
        stepped: called once every parameter has been stepped since `expect()`.
        lr_factor: returns the factor of an optimizer's learning rate in its next step.

    Attributes:
        stepping: True while an optimizer of the model runs its step, in which it may call a closure with backward
            passes.
        repeats: True if the next backward pass belongs to a step that already had one, because an optimizer calls its
            closure again.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        stepped: "weakref.WeakMethod[Callable[[], None]]",
        lr_factor: "weakref.WeakMethod[Callable[[Optimizer], float]]",
    ) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._stepped, self._lr_factor = stepped, lr_factor
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []  # (parameter group, own lr, multiplied lr)
        self._missing: set[int] | None = None
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self.stepping = self.repeats = False
        _watch_all_optimizers()
        _watching[self] = None

    def close(self) -> None:
        self._restore_lr()
        _watching.pop(self, None)

    def known(self) -> list[Optimizer]:
        return list(self._optimizers)

    def expect(self) -> None:
        """Wait for a step of every parameter from now on."""
        self._missing = set(self._parameters)

    def forget(self) -> None:
        self._missing = None

    def on_pass_end(self) -> bool:
        """Must be called at the end of a backward pass. Return whether the pass repeated an earlier pass of its
        step."""
        repeated, self.repeats = self.repeats, self.stepping
        return repeated

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._parameters_of(optimizer):
            return
        if hasattr(optimizer, "consolidate_state_dict"):  # a ZeroRedundancyOptimizer, or one like it
            raise HookRunError(
                f"{type(optimizer).__name__} steps each parameter on one rank only, with the gradient of that rank, "
                "but this hook averages weights, not gradients: use a plain optimizer, or shard the model by "
                "fully_shard"
            )
        self.stepping, self.repeats = True, False
        self._restore_lr()  # the previous step may have raised
        factor = 1.0 if (lr_factor := self._lr_factor()) is None else lr_factor(optimizer)
        for group in optimizer.param_groups if factor != 1.0 else ():
            own = group["lr"]  # a number or a tensor. Do not change the tensor in place: schedulers may hold it
            group["lr"] = own * factor
            self._scaled.append((group, own, group["lr"]))

    def _restore_lr(self) -> None:
        """Undo the multiplication, so that schedulers, logs and checkpoints see the user's learning rate."""
        for group, own, multiplied in self._scaled:
            if group["lr"] is multiplied:  # otherwise the step has set another learning rate
                group["lr"] = own
        self._scaled.clear()

    def after_step(self, optimizer: Optimizer) -> None:
        stepped = self._parameters_of(optimizer)
        if not stepped:
            return
        self.stepping = self.repeats = False
        self._restore_lr()
        self._optimizers[optimizer] = None
        if self._missing is not None:
            self._missing -= stepped
            if not self._missing:
                self._missing = None
                if (callback := self._stepped()) is not None:
                    callback()

    def _parameters_of(self, optimizer: Optimizer) -> set[int]:
        return {id(p) for group in optimizer.param_groups for p in group["params"]} & self._parameters.keys()

    def reset_nonfinite(self) -> None:
        """Reset the optimizer state of each parameter whose state has a non-finite number, such as Adam's moments after
        a bad gradient. All its later steps would be non-finite."""
        for optimizer in self._optimizers:
            for parameter in self._parameters.values():
                numbers = _numbers(optimizer.state.get(parameter, {}))
                if all(each.isfinite().all() for each in numbers):
                    continue
                if isinstance(optimizer, torch.optim.Adagrad):  # creates its state in the constructor, not in `step`
                    for each in numbers:
                        each.zero_()
                else:
                    del optimizer.state[parameter]


def _numbers(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the floating-point tensors in a parameter's optimizer state; for a DTensor this rank's shard."""
    tensors = [each for each in state.values() if isinstance(each, torch.Tensor)]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return [each for each in local if each.is_floating_point()]


_watching: weakref.WeakKeyDictionary[OptimizerSteps, None] = weakref.WeakKeyDictionary()
"""In the order of construction, which is the same on all ranks."""


@functools.cache
def _watch_all_optimizers() -> None:
    # Register once per process and never remove the hooks: torch fails if a hook is removed while it calls hooks, and
    # the garbage collector could run at that moment.
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable
def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_watching):
        each.before_step(optimizer)


@torch.compiler.disable
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for each in list(_watching):
        each.after_step(optimizer)
