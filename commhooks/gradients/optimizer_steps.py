"""When the optimizers of a model have stepped, and what they keep of its parameters."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


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
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        after_step = functools.partial(_after_step, weakref.ref(self))
        handle = register_optimizer_step_post_hook(after_step)
        self.close = weakref.finalize(self, handle.remove)
        """Stop watching."""

    def expect(self) -> None:
        """From now on wait for a step of every parameter."""
        self._missing = set(self._parameters)

    def forget(self) -> None:
        """Wait for nothing."""
        self._missing = None

    def after_step(self, optimizer: Optimizer) -> None:
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._parameters.keys()
        if not mine:
            return
        self._optimizers.add(optimizer)
        if self._missing is not None:
            self._missing -= mine
            if not self._missing:
                self._missing = None
                self._stepped()

    def moments(self) -> list[torch.Tensor]:
        """What the optimizers keep for each number of each parameter, such as Adam's moments: in one order on all ranks
        that have stepped the same parameters."""
        return [
            value
            for parameter in self._parameters.values()
            for optimizer in self._optimizers
            for _, value in sorted(optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point()
        ]


def _after_step(watch: "weakref.ref[OptimizerSteps]", optimizer: Optimizer, *_: Any) -> None:
    alive = watch()
    if alive is not None:
        alive.after_step(optimizer)
