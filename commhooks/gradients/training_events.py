"""When a model begins a forward pass, how many backward passes it has had, when its optimizers have stepped, and what
they keep of its parameters."""

import collections
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commhooks.errors import HookRunError


class BackwardPasses:
    """Counts the backward passes that give these parameters gradients, whoever averages them, until `stop`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._by_parameter: collections.Counter[int] = collections.Counter()
        note = functools.partial(_count, self._by_parameter)  # it holds no more than the counter
        trained = [each for each in parameters if each.requires_grad]
        self._handles = [each.register_post_accumulate_grad_hook(note) for each in trained]

    def stop(self) -> int:
        """Returns the number of passes: that of the parameter with the most, because a pass may leave out others."""
        for each in self._handles:
            each.remove()
        self._handles.clear()
        return max(self._by_parameter.values(), default=0)


def _count(by_parameter: "collections.Counter[int]", parameter: torch.Tensor) -> None:
    by_parameter[id(parameter)] += 1


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
        # In the order of their first steps, which is the same on all ranks.
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

    def moments(self) -> list[tuple[str, torch.Tensor]]:
        """What the optimizers keep for the numbers of each parameter, such as Adam's moments, and what it is: in one
        order on all ranks that have stepped the same parameters. None of those with `codes`."""
        return [
            (f"{key} of parameter {place}", each)
            for place, parameter, state in self._states()
            if not _is_coded(state)
            for key, each in _numbers(state).items()
            if each.dim() or not parameter.dim()  # not the count of steps
        ]

    def codes(self) -> int:
        """For how many parameters an optimizer keeps integers, as 8-bit optimizers do. The numbers beside them, such as
        scales, belong to these and have no mean without them."""
        return len({place for place, _, state in self._states() if _is_coded(state)})

    def _states(self) -> Iterator[tuple[int, torch.Tensor, dict[str, Any]]]:
        """Of each parameter its place, itself, and what each optimizer keeps for it."""
        for place, parameter in enumerate(self._parameters.values()):
            for optimizer in self._optimizers:
                yield place, parameter, optimizer.state.get(parameter, {})

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


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's shard."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _numbers(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of real numbers in what an optimizer keeps for a parameter."""
    found = {key: _own(each) for key, each in sorted(state.items()) if isinstance(each, torch.Tensor)}
    return {key: each for key, each in found.items() if each.is_floating_point()}


def _is_coded(state: dict[str, Any]) -> bool:
    tensors = [each for each in state.values() if isinstance(each, torch.Tensor)]
    return any(each.dim() > 0 and not each.is_floating_point() and not each.is_complex() for each in tensors)


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


class Listener(Protocol):
    def before_forward(self, module: torch.nn.Module) -> None: ...


class BeforeForward:
    """What a module calls before a forward pass in which gradients are recorded; to be registered as a forward
    pre-hook. It holds the listener weakly. In a copy or a pickle of the module it does nothing."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = None if listener is None else weakref.ref(listener)

    @torch.compiler.disable
    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        alive = None if self._listener is None else self._listener()
        if alive is not None and torch.is_grad_enabled():
            alive.before_forward(module)

    def __reduce__(self) -> Any:
        return BeforeForward, ()
