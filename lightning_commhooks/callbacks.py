"""Callbacks for a Trainer whose strategy has a communication hook."""

from typing import TYPE_CHECKING, Any, Optional

from commhooks import CommHook
from commhooks.hook.plugin_api import NAMES, PREFIX, Meter, check_arguments, check_choice, check_value
from lightning_commhooks.checkpoint import SaveResidual, with_defaults
from lightning_commhooks.strategy import warn

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback
else:
    Callback = object  # the base is added by `packages.trainer_classes`


class CommHookCheckpoint(Callback):
    """Sets what the trainer's full checkpoints hold of the communication hook. Holds settings only; the strategy does
    the saving, in `save_checkpoint`. `CommHookDDP` saves its hook with this callback or without, and takes the same two
    arguments. Weights-only checkpoints hold no state of the hook.

    Args:
        save_residual: what is saved of PowerSGD's error memory. "mean" (the default): the mean over the ranks, one
            model-sized copy, for any number of ranks; the run that saved and the run that resumes stay equal bit
            for bit. "per_rank": the residual of every rank, in the same file: as many model-sized copies as ranks.
            "drop": nothing.
        strict: whether resuming from a state of another hook or model is an error (the default). If not, what does
            not fit starts with fresh memory, and rank 0 warns once.

    Raises:
        commhooks.HookConfigError: at construction, for another value. When the Trainer starts, if the strategy was
            given another value, or if there are two of these callbacks.
    """

    # `Optional` instead of `X | None`, because jsonargparse shows the annotation in `--help`.
    def __init__(self, save_residual: Optional[SaveResidual] = None, strict: Optional[bool] = None) -> None:  # noqa: UP045
        super().__init__()
        checked = check_arguments(with_defaults(save_residual, strict))
        self.save_residual = save_residual
        self.strict: bool | None = None if strict is None else checked["strict"]

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        _warn_if_unhooked(
            trainer, "CommHookCheckpoint has nothing to save: it saves the hook of a CommHookDDP strategy"
        )


class CommHookRoundEnd(Callback):
    """Ends the round of the hook before other callbacks look at the model.

    A round: the local steps between two averages of the weights (DiLoCo, local SGD); nothing for other hooks. The
    strategies put this callback first in the Trainer's list, and end the round themselves before a checkpoint.
    """

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)


class CommHookMonitor(Callback):
    """Logs what the hook of a `CommHookDDP` or `CommHookFSDP2` strategy does, through all loggers of the trainer.

        Trainer(strategy=CommHookDDP(hook="powerSGD"), callbacks=[CommHookMonitor()])

    The names are those of `commhooks.report`; docs/working.md explains them. The values are those of rank 0.
    Nothing is computed in other steps, and the training is the same to the last bit with and without this callback.

    Args:
        every_n_steps: log every n optimizer steps; None (the default) is the trainer's `log_every_n_steps`.
        progress_bar: the value (by its name without "commhooks/") that the progress bar shows, with the prefix "hook_".
            The default is shown as "hook_x": times fewer bytes. None: no value.

    Raises:
        commhooks.HookConfigError: at construction, for another value.
    """

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
                trainer, "CommHookMonitor has nothing to log: it logs what the hook of a CommHookDDP strategy does"
            )

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._last_step = -1

    def on_before_optimizer_step(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Any) -> None:
        # Here the gradients are averaged and unscaled, but not clipped. With several optimizers: at the first of a
        # batch.
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
            pl_module.log(
                # Bars have little room: few letters and three digits.
                f"hook_{'x' if self.progress_bar == 'compression_rate' else self.progress_bar}",
                float(f"{shown:.3g}"),
                prog_bar=True,
                logger=False,
                on_step=True,
                on_epoch=False,
                rank_zero_only=True,
            )


def hook_stats(trainer: "pl.Trainer") -> dict[str, Any] | None:
    """`trainer.strategy.comm_hook.stats()`. After a fit whose processes were forked or spawned, as in notebooks, where
    `comm_hook` is None in the main process: the numbers of rank 0 at the end of the training. None if there was no
    hook."""
    hook = _hook_of(trainer)
    return getattr(trainer.state, "comm_hook_stats", None) if hook is None else hook.stats()


def _hook_of(trainer: Any) -> CommHook | None:
    return getattr(trainer.strategy, "comm_hook", None)


def _end_round(trainer: "pl.Trainer") -> None:
    hook = _hook_of(trainer)
    if hook is not None:
        hook.synchronize()


def _warn_if_unhooked(trainer: "pl.Trainer", text: str) -> bool:
    """Warn with `text` if the strategy of the trainer is not one with a hook. Return whether it warned."""
    if hasattr(trainer.strategy, "comm_hook"):
        return False
    strategy = type(trainer.strategy)
    warn(f"{text}, and the strategy of this Trainer is {strategy.__module__}.{strategy.__qualname__}", stacklevel=6)
    return True


def _x_axis(trainer: "pl.Trainer") -> int:
    """The step that `LightningModule.log` and Lightning's monitors use as x axis: private (lightning 2.6). Without it,
    the optimizers' steps, which are more if there are several of them."""
    return getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
