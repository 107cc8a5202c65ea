"""When the optimizers of a model have stepped."""

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
    """Watches all of torch's optimizers for steps of these parameters.

    Args:
        parameters: those of the model.
        stepped: called after the step with which the optimizers have stepped all parameters since `expect`.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], stepped: Callable[[], None]) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._stepped = stepped
        self._missing: set[int] | None = None
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self.stepping = False
        """An optimizer of the model is in its step, in which it may call a closure with further passes."""
        self.repeats = False
        """A further backward pass would be one of a step that has had one: LBFGS calls its closure on each rank as
        often as the numbers of that rank ask for."""
        _watch_all_optimizers()
        _watching[self] = None

    def close(self) -> None:
        """Stop watching."""
        _watching.pop(self, None)

    def expect(self) -> None:
        """From now on wait for a step of every parameter."""
        self._missing = set(self._parameters)

    def forget(self) -> None:
        """Wait for nothing."""
        self._missing = None

    def passed(self) -> bool:
        """A backward pass has ended. Returns whether it was a further one of its step."""
        repeated, self.repeats = self.repeats, self.stepping
        return repeated

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._mine(optimizer):
            return
        if hasattr(optimizer, "consolidate_state_dict"):  # a ZeroRedundancyOptimizer, or one like it
            raise HookRunError(
                f"{type(optimizer).__name__} steps each parameter on one rank only, by the gradient of that rank, as "
                "this hook averages weights and not gradients: use a plain optimizer, or shard the model by fully_shard"
            )
        self.stepping, self.repeats = True, False

    def after_step(self, optimizer: Optimizer) -> None:
        mine = self._mine(optimizer)
        if not mine:
            return
        self.stepping = self.repeats = False
        self._optimizers[optimizer] = None
        if self._missing is not None:
            self._missing -= mine
            if not self._missing:
                self._missing = None
                self._stepped()

    def _mine(self, optimizer: Optimizer) -> set[int]:
        return {id(p) for group in optimizer.param_groups for p in group["params"]} & self._parameters.keys()

    def known(self) -> list[Optimizer]:
        """Those that have stepped, in the order of their first steps."""
        return list(self._optimizers)

    def begin_anew(self) -> int:
        """Let the optimizers begin anew with the parameters for which they keep a number that is not finite, such as
        Adam's moments after a gradient that was not: their next steps would not be finite, either. Returns of how many
        parameters."""
        bad = [
            (optimizer, parameter)
            for optimizer in self._optimizers
            for parameter in self._parameters.values()
            if not all(each.isfinite().all() for each in _numbers(optimizer.state.get(parameter, {})).values())
        ]
        for optimizer, parameter in bad:
            if isinstance(optimizer, torch.optim.Adagrad):  # which makes its state when it is made, not when it steps
                for each in _numbers(optimizer.state[parameter]).values():
                    each.zero_()
            else:
                del optimizer.state[parameter]
        return len(bad)


def _numbers(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of real numbers in what an optimizer keeps for a parameter; of a DTensor this rank's shard."""
    tensors = {key: each for key, each in state.items() if isinstance(each, torch.Tensor)}
    own = {key: each.to_local() if isinstance(each, DTensor) else each for key, each in tensors.items()}
    return {key: each for key, each in own.items() if each.is_floating_point()}


_watching: weakref.WeakKeyDictionary[OptimizerSteps, None] = weakref.WeakKeyDictionary()
"""In the order in which they were made, which is the same on all ranks."""


@functools.cache
def _watch_all_optimizers() -> None:
    """Once in a process, for good: torch fails if one of its hooks is removed while it calls them, and a hook that went
    with its model would be whenever the garbage is collected."""
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
