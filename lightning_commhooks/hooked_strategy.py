"""What the strategies with a communication hook have in common, and what the callbacks ask of them."""

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from commhooks import CommHook, HookConfigError
from commhooks.errors import WARNING_PREFIX
from commhooks.hook.for_plugins import HookRequest, LossScale, ScaleOf, attach_request
from lightning_commhooks.twins import ParallelStrategy, for_the_other_trainer

if TYPE_CHECKING:
    import lightning.pytorch as pl

# A launcher that forks or spawns sends `trainer.state` of rank 0 back to the main process (lightning 2.6).
_STATS = "comm_hook_stats"


class HookedStrategy(ParallelStrategy):
    """Base of the strategies with a hook, by which the callbacks recognise them."""

    _request: HookRequest
    # Set when the model is wrapped. Before that, and in pickles, there is only the configuration.
    _comm_hook: CommHook | None = None
    _hooked_module: "weakref.ref[pl.LightningModule] | None" = None
    _trained_at_wrap: frozenset[str] = frozenset()
    _callbacks: "list[pl.Callback] | None" = None

    @property
    def comm_hook(self) -> CommHook | None:
        """The attached hook: `stats()`, `plan()`. None before the model is wrapped, and for `CommHookDDP(hook=None)`;
        kept when fit is over, closed (see `CommHook.close`).

        With the spawn and fork launchers, as in notebooks, it lives in the worker processes and stays None in the main
        one: `hook_stats(trainer)` has its numbers.
        """
        return self._comm_hook

    @property
    def save_residual(self) -> str:
        """Which residuals checkpoints hold: "mean", "per_rank" or "drop"."""
        return self._request.save_residual

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments()}){for_the_other_trainer(self)}"

    def _arguments(self) -> str:
        return f"hook={self._request.name!r}"

    def setup(self, trainer: "pl.Trainer") -> None:
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]
        super().setup(trainer)

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        # The tuner's trial runs, as of the learning-rate finder, have a list of callbacks of their own (lightning 2.6).
        if trainer.callbacks is self._callbacks and not trainer.fast_dev_run:
            left = _steps_left(trainer)
            if self._comm_hook is not None and left is not None:
                self._comm_hook.will_end(left)

    def end_round(self, *, optimizers: bool = False) -> None:
        """Let a hook that averages weights do so now, so that the model is that of all ranks. All of them call this.
        `optimizers`: as of `CommHook.synchronize`."""
        if self._comm_hook is not None:
            self._comm_hook.synchronize(optimizers=optimizers)

    def teardown(self) -> None:
        super().teardown()
        if self._comm_hook is not None:
            trainer: Any = None if self.lightning_module is None else self.lightning_module.trainer
            if trainer is not None and trainer.fast_dev_run:
                self._comm_hook.quiet()  # some batches only
            self._comm_hook.close()  # which another fit of this module could not attach a hook beside

    def __getstate__(self) -> dict[str, Any]:
        # Pickles (of the spawn launcher) and copies contain the configuration, never the hook of a wrapped model.
        return {**super().__getstate__(), "_comm_hook": None, "_hooked_module": None, "_callbacks": None}

    def hook_belongs_to(self, module: "pl.LightningModule") -> bool:
        """Whether the hook was attached for this module, not for a module trained earlier."""
        return self._hooked_module is not None and self._hooked_module() is module

    def parameters_unfrozen_after_wrap(self) -> list[str]:
        """Names of parameters that require a gradient now and did not when the model was wrapped."""
        module = self.lightning_module
        if self._comm_hook is None or module is None:
            return []
        trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        return [name for name in trained if name not in self._trained_at_wrap]

    def _attach(self, model: Any, **groups: Any) -> None:
        """Attach the hook to `model`, which is or is in the wrapped LightningModule."""
        module = self.lightning_module
        assert module is not None
        self._trained_at_wrap = frozenset(name for name, each in module.named_parameters() if each.requires_grad)
        self._hooked_module = weakref.ref(module)
        scale = loss_scale(module.trainer.precision_plugin, self.root_device)
        request = _with_start(self._request, module.trainer)
        self._comm_hook = attach_request(model, request, loss_scale=scale, **groups)


def hooked_strategy_of(trainer: "pl.Trainer") -> HookedStrategy | None:
    """The trainer's strategy if that is a `HookedStrategy`, else None."""
    return trainer.strategy if isinstance(trainer.strategy, HookedStrategy) else None


def warn_if_unhooked(trainer: "pl.Trainer", text: str) -> bool:
    """Warn, with this `text` of a callback, if the trainer's strategy has no hook. Return whether it has none."""
    if hooked_strategy_of(trainer) is not None:
        return False
    strategy = type(trainer.strategy)
    warn(f"{text}, and the strategy of this Trainer is {strategy.__module__}.{strategy.__qualname__}", stacklevel=6)
    return True


def hook_of(trainer: "pl.Trainer") -> CommHook | None:
    """The hook of the trainer's strategy, if there is one."""
    strategy = hooked_strategy_of(trainer)
    return None if strategy is None else strategy.comm_hook


def hook_stats(trainer: "pl.Trainer") -> dict[str, Any] | None:
    """`trainer.strategy.comm_hook.stats()`. After a fit whose processes were forked or spawned, as in notebooks, where
    `comm_hook` is None in the main process: the numbers of rank 0 at the end of the training. None if there was no
    hook."""
    hook = hook_of(trainer)
    return getattr(trainer.state, _STATS, None) if hook is None else hook.stats()


def keep_stats(trainer: "pl.Trainer") -> None:
    """Put the numbers where `hook_stats` finds them when the processes have ended. Call at the end of a training."""
    setattr(trainer.state, _STATS, hook_stats(trainer))


def loss_scale(plugin: Any, device: torch.device) -> Callable[[], LossScale] | None:
    """Returns the current scale of the GradScaler of a precision plugin (of a Trainer or Fabric); None without one."""
    if getattr(plugin, "scaler", None) is None:
        return None
    return ScaleOf(lambda: plugin.scaler, device)


def warn(text: str, stacklevel: int = 5) -> None:
    """Warn on rank 0."""
    from lightning_utilities.core.rank_zero import rank_zero_warn  # here, because without Lightning it is missing

    rank_zero_warn(f"{WARNING_PREFIX}{text}", stacklevel=stacklevel)  # 4 and this function


def _with_start(request: HookRequest, trainer: "pl.Trainer") -> HookRequest:
    """`request` with its start as a number of steps.

    Raises:
        HookConfigError: it is a fraction of a run of unknown length.
    """
    config = request.config
    if config is None or isinstance(config.configured_start, int):
        return request
    steps, option = _steps_left(trainer), config.start_option
    if steps is None and config.configured_start is not None:
        unknown = "does not know (max_epochs=-1, or a data set without length): set max_steps in the Trainer, or"
        if not trainer.lightning_module.automatic_optimization:
            unknown = "does not know in backward passes (manual optimization decides how many each batch has):"
        raise HookConfigError(
            f"{option}={config.configured_start!r} is a fraction of the run, whose length the Trainer {unknown} give "
            f"{option} as an int, a number of steps"
        )
    return dataclasses.replace(request, config=config.resolved(steps))


def _steps_left(trainer: "pl.Trainer") -> int | None:
    """Number of synchronised backward passes from here to the end of the run; None if unknown.

    Automatic optimization has one per optimizer step, also with gradient accumulation. With manual optimization the
    user's code decides.
    """
    if not trainer.lightning_module.automatic_optimization:
        return None
    # -1 for a data set without length, inf for max_epochs=-1; the steps of an earlier fit are subtracted.
    left = trainer.estimated_stepping_batches - trainer.global_step
    return int(left) if 1 <= left < math.inf else None
