"""What the strategies for Lightning's Trainers share, and what `CommHookDDP` adds to `DDPStrategy`.

The mixins of this package import no Lightning. `lightning_pytorch.py` and `pytorch_lightning.py`
have the strategies and callbacks with them, `fabric.py` and `lightning_fabric.py` the strategies
for Fabric.
"""

import dataclasses
import inspect
import math
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional, Union

import torch
from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook, HookConfigError, PayloadError, Torchft
from commhooks.errors import WARNING_PREFIX, no_such
from commhooks.hook.plugin_api import (
    COMPRESSORS,
    HookConfig,
    HookRequest,
    LossScale,
    ScaleOf,
    arguments_in,
    attach_request,
    cut_off,
    nothing_saved,
    print_error_on_rank_zero,
    suggests_arguments,
)
from lightning_commhooks.checkpoint import (
    CHECKPOINT_KEY,
    PER_RANK_WARNING_BYTES,
    SaveResidual,
    errors_name_checkpoint,
    saves_alone,
    with_defaults,
)
from lightning_commhooks.packages import MODULES

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy

    HookType = HookConfig | Callable[..., Any] | str | None
else:
    # At runtime the class that has this mixin adds Lightning's strategy, which `super()` reaches.
    DDPStrategy = ParallelStrategy = object
    # LightningCLI accepts and documents the config classes that are named here. `str` must be last:
    # if it preceded Callable, jsonargparse would pass the path of a function as a string.
    HookType = Union[(None, *(hook.Config for hook in COMPRESSORS.values()), Callable, str)]

_OF_ANOTHER_HOOK = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
_FROM_LIGHTNING = {
    "loss_scale": "Lightning passes the scale of its GradScaler itself",
    "total_steps": "the Trainer knows the length of the run",
}
_NOT_FOR_USERS = {"self", "kwargs", "ddp_kwargs", "module", "device_ids"}


class HookedStrategy(ParallelStrategy):
    """The mixin of all strategies.

    A class with it has the Trainer's package, and the callbacks for that Trainer.
    """

    package: ClassVar[str]
    checkpoint_callback: "ClassVar[type[pl.Callback]]"
    round_end_callback: "ClassVar[type[pl.Callback]]"

    _request: HookRequest
    # None until the model is wrapped, and in pickles.
    _comm_hook: CommHook | None = None
    _hooked_module: "weakref.ref[pl.LightningModule] | None" = None
    _callbacks: "list[pl.Callback] | None" = None

    @property
    def comm_hook(self) -> CommHook | None:
        """The attached hook; None before the model is wrapped, and for `CommHookDDP(hook=None)`.

        After fit the hook is kept, but closed (see `CommHook.close`).

        With the spawn and fork launchers, as in notebooks, the hook exists in the worker processes
        only and is None in the main process; call `hook_stats(trainer)` there.
        """
        return self._comm_hook

    @property
    def save_residual(self) -> str:
        """Which residuals checkpoints hold: "mean", "per_rank" or "drop"."""
        return self._request.save_residual

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments()}){self._not_for_the_other_trainer()}"

    def _arguments(self) -> str:
        return f"hook={self._request.name!r}"

    # ---- what Lightning calls
    # ----------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        # Here strategy and callbacks are both known for the first time, and a callback added now
        # still receives all events. Scripts may call this before `fit`, which calls it again.
        if self.lightning_module is not None:
            self._prepare_callbacks(self.lightning_module.trainer)
        super().setup_environment()

    def setup(self, trainer: "pl.Trainer") -> None:
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]
        super().setup(trainer)

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._trainer
        # The tuner's trial runs, as for the learning-rate finder, replace the list of callbacks
        # (lightning 2.6).
        if trainer.callbacks is self._callbacks and not trainer.fast_dev_run:
            left = _steps_left(trainer)
            if self._comm_hook is not None and left is not None:
                self._comm_hook.will_end(left)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._comm_hook is not None:
            self._comm_hook.failed(exception)
        # After SIGTERM Lightning raises a SystemExit between two batches.
        if (
            self._comm_hook is not None
            and self._trainer.received_sigterm
            and isinstance(exception, SystemExit)
        ):
            if (members := self._comm_hook.members) is not None:
                members.leave()

    def on_train_end(self) -> None:
        super().on_train_end()
        # Launchers that fork or spawn send rank 0's `trainer.state` back to the main process
        # (lightning 2.6).
        self._trainer.state.comm_hook_stats = (
            None if self._comm_hook is None else self._comm_hook.stats()
        )

    def teardown(self) -> None:
        super().teardown()
        if self._comm_hook is not None:
            if self.lightning_module is not None and self._trainer.fast_dev_run:
                self._comm_hook.quiet()
            self._comm_hook.close()  # otherwise another fit of this module could not attach a hook

    def __getstate__(self) -> dict[str, Any]:
        # The spawn launcher pickles the strategy: pickles and copies contain the configuration,
        # never a hook.
        return {
            **super().__getstate__(),
            "_comm_hook": None,
            "_hooked_module": None,
            "_callbacks": None,
        }

    # ---- helpers
    # ----------------------------------------------------------------------------------------------

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _saved_hook(self) -> CommHook | None:
        """The hook whose state goes into checkpoints; None if there is none of this module."""
        module = self.lightning_module
        hooked = self._hooked_module
        if self._request.off or module is None or hooked is None or hooked() is not module:
            return None
        return self._comm_hook

    def _attach(self, model: Any, **groups: Any) -> None:
        assert self.lightning_module is not None
        self._hooked_module = weakref.ref(self.lightning_module)
        request = _with_start(self._request, self._trainer)
        scale = loss_scale(self._trainer.precision_plugin, self.root_device)
        self._comm_hook = attach_request(model, request, loss_scale=scale, **groups)
        if (members := self._comm_hook.members) is not None:
            progress = _Progress(self._trainer)
            members.register("lightning", progress.state_dict, progress.load_state_dict)

    def _prepare_callbacks(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            self._check_packages([*trainer.callbacks, *trainer.loggers])
        # `trainer.callbacks` is an ordinary list; Lightning itself appends to it.
        if not any(isinstance(callback, self.round_end_callback) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, self.round_end_callback())

    def _check_packages(self, objects: list[object]) -> None:
        here = self.package
        twin = self._twin_package()
        root = twin.partition(".")[0]
        of_twin = [
            type(value)
            for value in objects
            if any(base.__module__.partition(".")[0] == root for base in type(value).__mro__)
        ]
        for cls in of_twin:
            name = cls.__name__
            if cls.__module__.partition(".")[0] == __package__:
                raise HookConfigError(
                    f"this {name} is for the Trainer of {twin}, and the Trainer is from {here}:"
                    f" write `from {MODULES[here]} import {name}`"
                )
        if of_twin:
            names = ", ".join(cls.__name__ for cls in of_twin)
            warn(
                f"this Trainer is from {here}, and these are from {twin}: {names}. The Trainer does"
                " not recognise them, for example as checkpoint callbacks: replace every import of"
                f" {twin}"
            )

    def _not_for_the_other_trainer(self) -> str:
        twin = self._twin_package()
        if twin.partition(".")[0] not in sys.modules:
            return ""
        return (
            f" (a strategy for `{self.package}.Trainer`; a `{twin}.Trainer` cannot use it: write"
            f" `from {MODULES[twin]} import {type(self).__name__}`, or replace every import of"
            f" {twin})"
        )

    def _twin_package(self) -> str:
        return next(package for package in MODULES if package != self.package)


class HookedDDP(HookedStrategy, DDPStrategy):
    """The mixin of `CommHookDDP` in `lightning_pytorch.py` and `pytorch_lightning.py`."""

    @suggests_arguments
    def __init__(
        self,
        hook: HookType,
        *,
        hook_options: Optional[dict[str, Any]] = None,  # noqa: UP045
        hook_state: Any = None,
        wrapper: Optional[Literal["fp16", "bf16"]] = None,  # noqa: UP045
        save_residual: Optional[SaveResidual] = None,  # noqa: UP045
        strict: Optional[bool] = None,  # noqa: UP045
        check_every: Optional[int] = None,  # noqa: UP045
        ranks_per_node: Union[int, Literal["auto"], None] = None,  # noqa: UP007
        members: Union[Torchft, Literal["torchft"], None] = None,  # noqa: UP007
        **ddp_kwargs: Any,
    ) -> None:
        check_ddp_arguments(ddp_kwargs, HookedDDP.__init__, super().__init__)
        super().__init__(**ddp_kwargs)
        self._request = HookRequest.parse(
            **arguments_in(locals()) | with_defaults(save_residual, strict)
        )
        self._given = {
            "save_residual": save_residual,
            "strict": None if strict is None else self._request.strict,
        }
        self._checkpoint_path: str | Path = "the checkpoint"
        self._warned_about_size = False

    # ---- what Lightning calls
    # ----------------------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        super().configure_ddp()
        # Attached even with hook=None, so that the ranks compare their requests.
        self._attach(self.model)
        if self._request.off:
            self._comm_hook = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning asks for the weights before it reads anything else that it saves, also for
        # weights-only checkpoints.
        hook = self._saved_hook
        if hook is not None and not saves_alone(self._trainer):
            hook.synchronize(optimizers=True)
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        hook = self._saved_hook
        # Lightning calls this on every rank. Weights-only checkpoints have no "optimizer_states".
        if hook is not None and "optimizer_states" in checkpoint:
            self._warn_about_size(hook)
            joint = not saves_alone(self._trainer)
            state = hook.state_dict(self.save_residual, gather=True, joint=joint)
            checkpoint[CHECKPOINT_KEY] = state
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @print_error_on_rank_zero()
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # Security: by default Lightning 2.6 executes code in a checkpoint. Here the default is
        # weights_only=True; for trusted files users pass weights_only=False to `fit`.
        self._checkpoint_path = checkpoint_path
        weights_only = True if weights_only is None else weights_only
        try:
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        except Exception as error:  # torch raises many kinds for truncated or foreign files
            if cut := cut_off(checkpoint_path, error):
                raise PayloadError(f"{checkpoint_path} {cut}. Resume from another one") from error
            # the message names the file, or code in it has failed
            if isinstance(error, OSError) or not weights_only:
                raise
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            remedy = ""
            # torch 2.13 names a type that is not plain in this form
            if foreign := re.search(r"GLOBAL (\S+)", str(error)):
                reason = f"it holds a {foreign[1]}"
                remedy = f", or call torch.serialization.add_safe_globals([{foreign[1]}])"
            raise PayloadError(
                f"{checkpoint_path} cannot be read ({reason}). Nothing in it was run; if you trust"
                " what made it and it is whole, pass weights_only=False to the Trainer's"
                f" method{remedy}"
            ) from error

    @print_error_on_rank_zero()
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # The hook's state is restored here, because Lightning calls this after the model is
        # wrapped, only in fit and only for full checkpoints: `validate(ckpt_path=...)` does not
        # change the hook, and the learning-rate finder, which restores its own checkpoint, resets
        # it.
        hook = self._comm_hook
        take_over = None
        if hook is not None and CHECKPOINT_KEY in checkpoint:
            # Check everything before the optimizers load their states.
            with errors_name_checkpoint(self._checkpoint_path):
                take_over = hook.prepare_load(checkpoint[CHECKPOINT_KEY], self._request.strict)
        super().load_optimizer_state_dict(checkpoint)
        if take_over is not None:
            take_over()
        elif hook is not None:
            warn(nothing_saved("the checkpoint", "it was saved without CommHookDDP", hook.name))

    # ---- helpers
    # ----------------------------------------------------------------------------------------------

    def _prepare_callbacks(self, trainer: Any) -> None:
        super()._prepare_callbacks(trainer)
        callbacks: list[Any] = [
            callback
            for callback in trainer.callbacks
            if isinstance(callback, self.checkpoint_callback)
        ]
        if len(callbacks) > 1:
            raise HookConfigError(
                f"{len(callbacks)} CommHookCheckpoint callbacks in one Trainer; pass one at most"
            )
        for callback in callbacks:
            for name, ours in self._given.items():
                theirs = getattr(callback, name)
                if ours is not None and theirs is not None and ours != theirs:
                    raise HookConfigError(
                        f"CommHookDDP({name}={ours!r}) and CommHookCheckpoint({name}={theirs!r})"
                        f" contradict each other; set {name} in one place"
                    )
                if theirs is not None:
                    self._request = dataclasses.replace(self._request, **{name: theirs})

    def _warn_about_size(self, hook: CommHook) -> None:
        if self.save_residual != "per_rank" or self._warned_about_size:
            return
        size = hook.plan().saved_residuals
        if size > PER_RANK_WARNING_BYTES:
            self._warned_about_size = True
            warn(
                f"save_residual='per_rank' puts about {size / 1e9:.1f} GB of residuals"
                f" ({self.world_size} ranks) into every checkpoint, gathered on every rank;"
                " save_residual='mean' needs one copy of the model only"
            )


class _Progress:
    """Hands over the Trainer's epoch, batch, global step and schedulers to a machine that joins.

    It refers weakly to the Trainer, which the hook may outlive.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer: pl.Trainer = weakref.proxy(trainer)

    @property
    def _parts(self) -> list[Any]:
        loop = self._trainer.fit_loop.epoch_loop
        return [
            self._trainer.fit_loop.epoch_progress,
            loop.batch_progress,
            loop.automatic_optimization.optim_progress,
            loop.manual_optimization.optim_step_progress,
            *(config.scheduler for config in self._trainer.lr_scheduler_configs),
        ]

    def state_dict(self) -> list[Any]:
        return [
            self._trainer.fit_loop.epoch_loop.on_save_checkpoint(),
            *(part.state_dict() for part in self._parts),
        ]

    def load_state_dict(self, state: list[Any]) -> None:
        loop, epoch = self._trainer.fit_loop, self._trainer.current_epoch
        loop.epoch_loop.on_load_checkpoint(state[0])
        for part, saved in zip(self._parts, state[1:], strict=True):
            part.load_state_dict(saved)
        # Private (lightning 2.6): nothing public begins a pass over the data anew. What is left of
        # this machine's own pass may be shorter than the other's epoch, which would end with it.
        fetcher = getattr(loop, "_data_fetcher", None)
        if fetcher is not None and self._trainer.current_epoch != epoch:
            iter(fetcher)


def warn(text: str, stacklevel: int = 5) -> None:
    # Here, because it is missing without Lightning.
    from lightning_utilities.core.rank_zero import rank_zero_warn

    rank_zero_warn(f"{WARNING_PREFIX}{text}", stacklevel=stacklevel)  # 4 and this function


# ---- arguments
# --------------------------------------------------------------------------------------------------


def check_ddp_arguments(arguments: Mapping[str, Any], *constructors: Callable[..., None]) -> None:
    """Raise HookConfigError for an argument that sets another hook, or that nothing takes.

    `constructors`: what takes arguments, in addition to DDP's.
    """
    for name in _OF_ANOTHER_HOOK:
        if arguments.get(name) is not None:
            raise HookConfigError(
                f"{name}= together with hook=: CommHookDDP attaches its own hook and DDP takes only"
                " one. Pass your hook as hook= (with hook_state= and wrapper=); post-local SGD is"
                " hook='local_sgd' with start_iter"
            )
    names: set[str] = set()
    for constructor in (*constructors, DistributedDataParallel.__init__):
        names.update(inspect.signature(constructor).parameters)
    names -= _NOT_FOR_USERS
    for name in arguments:
        if name in _FROM_LIGHTNING:
            raise HookConfigError(
                f"CommHookDDP has no argument {name!r}: {_FROM_LIGHTNING[name]}; leave it out"
            )
        if name not in names:
            offered = sorted(names.difference(_OF_ANOTHER_HOOK, ["mixed_precision"]))
            raise no_such("CommHookDDP", "argument", name, offered)


def loss_scale(plugin: Any, device: torch.device) -> Callable[[], LossScale] | None:
    if getattr(plugin, "scaler", None) is None:
        return None
    return ScaleOf(lambda: plugin.scaler, device)


def _with_start(request: HookRequest, trainer: "pl.Trainer") -> HookRequest:
    config = request.config
    if config is None or isinstance(config.configured_start, int):
        return request
    steps = _steps_left(trainer)
    option = config.start_option
    if steps is None and config.configured_start is not None:
        unknown = (
            "does not know (max_epochs=-1, or a data set without length): set max_steps in the"
            " Trainer, or"
        )
        if not trainer.lightning_module.automatic_optimization:
            unknown = (
                "does not know in backward passes (manual optimization decides how many each batch"
                " has):"
            )
        raise HookConfigError(
            f"{option}={config.configured_start!r} is a fraction of the run, whose length the"
            f" Trainer {unknown} give {option} as an int, a number of steps"
        )
    return dataclasses.replace(request, config=config.resolved(steps))


def _steps_left(trainer: "pl.Trainer") -> int | None:
    """Return the number of backward passes with communication until the end of the run.

    There is one per optimizer step. None if unknown, as with manual optimization, where the user's
    code decides.
    """
    if not trainer.lightning_module.automatic_optimization:
        return None
    # -1 for a data set without length, inf for max_epochs=-1; the steps of an earlier fit are
    # subtracted.
    left = trainer.estimated_stepping_batches - trainer.global_step
    return int(left) if 1 <= left < math.inf else None
