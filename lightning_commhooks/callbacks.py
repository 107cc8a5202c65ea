"""What the callbacks add to Lightning's `Callback`, for a Trainer with a communication hook."""

from typing import TYPE_CHECKING, Any, Optional

from commhooks import CommHook
from commhooks.hook.plugin_api import (
    NAMES,
    PREFIX,
    Meter,
    check_arguments,
    check_choice,
    check_value,
)
from lightning_commhooks.checkpoint import SaveResidual, with_defaults
from lightning_commhooks.strategy import warn

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback
else:
    Callback = object  # see strategy.py


class CheckpointMixin(Callback):
    """The mixin of `CommHookCheckpoint`."""

    # `Optional` instead of `X | None`, because jsonargparse shows the annotation in `--help`.
    def __init__(
        self,
        save_residual: Optional[SaveResidual] = None,  # noqa: UP045
        strict: Optional[bool] = None,  # noqa: UP045
    ) -> None:
        super().__init__()
        checked = check_arguments(with_defaults(save_residual, strict))
        self.save_residual = save_residual
        self.strict: bool | None = None if strict is None else checked["strict"]

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        _warn_if_unhooked(
            trainer,
            "CommHookCheckpoint has nothing to save: it saves the hook of a CommHookDDP strategy",
        )


class RoundEndMixin(Callback):
    """The mixin of `CommHookRoundEnd`."""

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)
        hook = _hook_of(trainer)
        if hook is not None and hook.members is not None:
            hook.members.leave()  # with the steps of a round that it does not end


class MonitorMixin(Callback):
    """The mixin of `CommHookMonitor`."""

    # `Optional` instead of `X | None`, because jsonargparse shows the annotations in `--help`.
    def __init__(
        self,
        every_n_steps: Optional[int] = None,  # noqa: UP045
        progress_bar: Optional[str] = "compression_rate",  # noqa: UP045
    ) -> None:
        super().__init__()
        check_choice("progress_bar", progress_bar, (None, *NAMES))
        self.every_n_steps: int | None = check_value("every_n_steps", every_n_steps, int | None)
        self.progress_bar = progress_bar
        self._warned = False
        self._meter = Meter()
        self._last_step = -1

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage == "fit" and not self._warned:
            self._warned = _warn_if_unhooked(
                trainer,
                "CommHookMonitor has nothing to log: it logs what the hook of a CommHookDDP"
                " strategy does",
            )

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._last_step = -1

    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Any
    ) -> None:
        # Here the gradients are averaged and unscaled, but not clipped. With several optimizers,
        # this logs at the first step of a batch.
        hook = _hook_of(trainer)
        if hook is None or not trainer.is_global_zero:
            return
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = _x_axis(trainer)
        if not every or (step + 1) % every or step == self._last_step:
            return
        self._last_step = step
        values = self._meter.read(hook)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)
        shown = values.get(f"{PREFIX}/{self.progress_bar}")
        if shown is not None:
            # Progress bars have little room, so use a short name and three digits.
            name = "x" if self.progress_bar == "compression_rate" else self.progress_bar
            pl_module.log(
                f"hook_{name}",
                float(f"{shown:.3g}"),
                prog_bar=True,
                logger=False,
                on_step=True,
                on_epoch=False,
                rank_zero_only=True,
            )


def hook_stats(trainer: "pl.Trainer") -> dict[str, Any] | None:
    """Return `trainer.strategy.comm_hook.stats()`; None without a hook.

    After a fit in forked or spawned processes, as in notebooks, `comm_hook` is None in the main
    process; then return rank 0's statistics at the end of the run.
    """
    hook = _hook_of(trainer)
    return getattr(trainer.state, "comm_hook_stats", None) if hook is None else hook.stats()


def _hook_of(trainer: Any) -> CommHook | None:
    return getattr(trainer.strategy, "comm_hook", None)


def _end_round(trainer: "pl.Trainer") -> None:
    hook = _hook_of(trainer)
    if hook is not None:
        hook.synchronize()


def _warn_if_unhooked(trainer: "pl.Trainer", text: str) -> bool:
    if hasattr(trainer.strategy, "comm_hook"):
        return False
    strategy = type(trainer.strategy)
    warn(
        f"{text}, and the strategy of this Trainer is"
        f" {strategy.__module__}.{strategy.__qualname__}",
        stacklevel=6,
    )
    return True


def _x_axis(trainer: "pl.Trainer") -> int:
    """Return the step that `LightningModule.log` uses as x axis, which is private (lightning 2.6).

    Without it return the number of optimizer steps, which is larger with several optimizers.
    """
    return getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
