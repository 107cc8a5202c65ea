"""The only place where local steps hook into torch: forward passes, the ends of backward passes,
and the steps of optimizers become events of `schedule.py`. During a step the learning rate of the
optimizer may be multiplied."""

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from commhooks.gradients.torch_private import copy_each, run_after_backward
from commhooks.local_steps.learning_rate import ScaledRates
from commhooks.local_steps.notices import refuse_sharded_steps
from commhooks.local_steps.schedule import (
    Event,
    ForwardBegins,
    LateBackwardEnds,
    PassCounts,
    State,
    StepBegins,
    StepEnds,
    StepFails,
)

_SAMPLED = 16


class Listener(Protocol):
    """Gets the events. It is referenced weakly."""

    state: State

    def on(self, event: Event) -> None: ...

    def lr_factor(self, optimizer: Optimizer) -> float:
        """Return the factor of the optimizer's learning rate in its next step."""


class TrainingEvents:
    """Watches the training of one model, until `close`.

    Args:
        stepped: the parameters as optimizers hold them.
        listener: gets `ForwardBegins`, `StepBegins`, `StepEnds` and `StepFails`, and after
            `call_after_backward` its two events."""

    def __init__(
        self, module: torch.nn.Module, stepped: Sequence[torch.Tensor], listener: Listener
    ) -> None:
        self._parameters = {id(parameter): parameter for parameter in stepped}
        # `State.ended` at the latest step of each parameter
        self._stepped_at = dict.fromkeys(self._parameters, -1)
        self._listener = weakref.ref(listener)
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        _watch_all_optimizers()
        _watching[self] = None
        # Run before torch's own hooks, because the hook of fully_shard gathers the weights.
        self._before_forward = module.register_forward_pre_hook(
            _BeforeForward(listener), prepend=True
        )

    def close(self) -> None:
        for optimizer in list(_scaled.changed):
            if self._parameters_of(optimizer):
                _scaled.restore(optimizer.param_groups)
        self._before_forward.remove()
        _watching.pop(self, None)

    def call_after_backward(self) -> None:
        """Send `LateBackwardEnds` and `PassCounts` at the end of this backward pass. Call this
        within it."""
        run_after_backward(functools.partial(_after_backward, self._listener))

    # ---- optimizers
    # ----------------------------------------------------------------------------------------------

    def known(self) -> list[Optimizer]:
        """Return the optimizers that have stepped parameters of the model."""
        return list(self._optimizers)

    @property
    def all_stepped(self) -> bool:
        """Whether each parameter has been stepped at least once."""
        return min(self._stepped_at.values(), default=-1) >= 0

    def before_step(self, optimizer: Optimizer) -> None:
        listener = self._listener()
        if listener is None or not self._parameters_of(optimizer):
            return
        if optimizer not in self._optimizers:
            refuse_sharded_steps(optimizer)
        listener.on(StepBegins())

    def multiply_rates(self, optimizer: Optimizer) -> None:
        listener = self._listener()
        groups = [group for group in optimizer.param_groups if self._parameters_in(group)]
        if listener is not None and groups:
            _scaled.multiply(optimizer, groups, listener.lr_factor(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        listener, stepped = self._listener(), self._parameters_of(optimizer)
        if listener is None or not stepped:
            return
        self._optimizers[optimizer] = None
        self._stepped_at.update(dict.fromkeys(stepped, listener.state.ended))
        listener.on(StepEnds(min(self._stepped_at.values())))

    def step_has_failed(self, optimizer: Optimizer) -> None:
        listener = self._listener()
        if listener is not None and self._parameters_of(optimizer):
            listener.on(StepFails())

    def _parameters_of(self, optimizer: Optimizer) -> set[int]:
        return set[int]().union(*map(self._parameters_in, optimizer.param_groups))

    def _parameters_in(self, group: dict[str, Any]) -> set[int]:
        return set(map(id, group["params"])) & self._parameters.keys()

    def reset_nonfinite(self) -> None:
        """Reset the optimizer state of each parameter whose state has a non-finite number, such as
        Adam's moments after a bad gradient. All its later steps would be non-finite."""
        for optimizer in self._optimizers:
            for parameter in self._parameters.values():
                numbers = _numbers(optimizer.state.get(parameter, {}))
                if all(number.isfinite().all() for number in numbers):
                    continue
                # creates its state in the constructor, not in `step`
                if isinstance(optimizer, torch.optim.Adagrad):
                    for number in numbers:
                        number.zero_()
                else:
                    del optimizer.state[parameter]


def _numbers(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return the floating-point tensors in a parameter's optimizer state; for a DTensor this
    rank's shard."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [tensor for tensor in local if tensor.is_floating_point()]


class WeightSample:
    """Tells whether something other than an optimizer or an outer step has changed the weights,
    such as an average of the weights that was put into the model, or the evaluation mode of a
    schedule-free optimizer.

    After each step it keeps one number of each of up to 16 parameters, because to read all weights
    would cost as much as a part of the step; version counters of tensors do not see what is
    written through `parameter.data`. Changes as small as rounding, such as of a mode that was left
    again, do not count."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        sampled = [parameter for parameter in parameters if parameter.numel()]
        self._parameters = sampled[:: max(1, -(-len(sampled) // _SAMPLED))]
        self._places: list[int] = []
        self._views: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self.changed = False

    def forget(self) -> None:
        """Begin again: until the next `keep`, nothing counts as a change."""
        self._kept, self.changed = [], False

    @torch.no_grad()
    def keep(self, *, stepped: bool) -> None:
        """Keep the weights as they are now. `stepped`: an optimizer has just stepped all
        parameters; else an outer step has changed the weights, and an earlier change stays
        known."""
        if not stepped and not self._kept:
            return
        places = [parameter.data_ptr() for parameter in self._parameters]
        if places != self._places:  # a view of a parameter's old memory would never change
            self._places, self._views = (
                places,
                [_middle(parameter) for parameter in self._parameters],
            )
            self._kept = []
        if self._kept:
            copy_each(self._kept, self._views)
        else:
            self._kept = [view.clone() for view in self._views]
        self.changed = self.changed and not stepped

    @torch.no_grad()
    def compare(self) -> bool:
        """Return whether the weights have changed since `keep`, or had when this was called
        before. Waits for an accelerator."""
        for parameter, kept in zip(self._parameters, self._kept, strict=False):
            now, rounding = _middle(parameter).to(kept), 4 * torch.finfo(kept.dtype).eps
            self.changed = self.changed or not torch.allclose(
                now, kept, rtol=rounding, atol=0.0, equal_nan=True
            )
        return self.changed


def _middle(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of one number in the middle of a parameter, whatever its layout in memory."""
    return parameter.detach()[tuple(size // 2 for size in parameter.shape)]


_scaled = ScaledRates()

_stepping: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The ids of the `_StepArguments` of the steps that run."""

_watching: weakref.WeakKeyDictionary[TrainingEvents, None] = weakref.WeakKeyDictionary()
"""In the order of construction, which is the same on all ranks."""


@functools.cache
def _watch_all_optimizers() -> None:
    # Register once per process and never remove the hooks: torch fails if a hook is removed while
    # it calls hooks, and the garbage collector could run at that moment.
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@torch.compiler.disable
def _before_step(optimizer: Optimizer, arguments: Any, keywords: Any) -> Any:
    is_noticed = _is_stepping(optimizer)
    noticed = _StepArguments(optimizer, keywords)
    if is_noticed:
        _stepping[optimizer] = id(noticed)
    for events in list(_watching):
        events.before_step(optimizer)
    _multiply_rates(optimizer)
    if not is_noticed:
        return None
    if _is_closure(noticed.get("closure")):
        noticed["closure"] = _with_users_rates(optimizer, noticed["closure"])
    elif len(arguments) > 1 and _is_closure(arguments[1]):
        arguments = (optimizer, _with_users_rates(optimizer, arguments[1]), *arguments[2:])
    return arguments, noticed


def _is_closure(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, torch.nn.Module)


def _multiply_rates(optimizer: Optimizer) -> None:
    # an exception of the previous step may be kept, or a step within this one has multiplied them
    _scaled.restore(optimizer.param_groups)
    for events in list(_watching):
        events.multiply_rates(optimizer)


def _with_users_rates(optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
    """Return a closure that runs with the user's learning rates: in Lightning it is the whole
    training step, which may log rates, and set them by a schedule."""

    def with_users_rates(*arguments: Any, **keywords: Any) -> Any:
        _scaled.restore(optimizer.param_groups)
        result = closure(*arguments, **keywords)
        _multiply_rates(optimizer)
        return result

    return with_users_rates


@torch.compiler.disable
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    _stepping.pop(optimizer, None)
    _scaled.restore(optimizer.param_groups)
    for events in list(_watching):
        events.after_step(optimizer)


class _StepArguments(dict[str, Any]):
    """The keyword arguments of a step, which notice that the step has raised: torch then calls no
    hook, but nothing refers to them any more once the exception is handled."""

    def __init__(self, optimizer: Optimizer, keywords: dict[str, Any]) -> None:
        super().__init__(keywords)
        self._optimizer = weakref.ref(optimizer)

    def __del__(self) -> None:
        optimizer = self._optimizer()
        # another hook may have replaced the arguments of the step that runs
        if optimizer is None or _stepping.get(optimizer) != id(self) or _is_stepping(optimizer):
            return
        del _stepping[optimizer]
        _scaled.restore(optimizer.param_groups)
        for events in list(_watching):
            events.step_has_failed(optimizer)


def _is_stepping(optimizer: Optimizer) -> bool:
    """Return whether `step` of the optimizer's class runs in this thread, and is not compiled."""
    code = getattr(type(optimizer).step, "__code__", None)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _after_backward(listener: Callable[[], Listener | None]) -> None:
    alive = listener()
    if alive is not None:
        alive.on(LateBackwardEnds())
        alive.on(PassCounts())


class _BeforeForward:
    """Tells the listener of forward passes that record gradients. Holds only a weak reference to
    the listener; does nothing in a copy or pickle of the module.
    """

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = None if listener is None else weakref.ref(listener)

    @torch.compiler.disable
    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        alive = None if self._listener is None else self._listener()
        if alive is not None and torch.is_grad_enabled():
            alive.on(ForwardBegins(module.training))

    def __reduce__(self) -> Any:
        return _BeforeForward, ()
