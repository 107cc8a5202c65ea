"""`CommHookMonitor`: logs the metrics of the communication hook through the trainer's loggers."""

from typing import TYPE_CHECKING, Any, Optional

from commhooks.hook.for_plugins import NAMES, PREFIX, Meter, check_choice, check_value
from lightning_commhooks.hooked_strategy import hook_of, warn_if_unhooked
from lightning_commhooks.twins import Callback, check_twin

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HookMonitor(Callback):
    """Logs every n steps what the hook of a `CommHookDDP` strategy does, through all loggers of the trainer.

        Trainer(strategy=CommHookDDP(hook="powerSGD"), callbacks=[CommHookMonitor()])

    The names are those of `commhooks.report`, and docs/metrics.md says what they mean; the values are those of
    rank 0.

    Nothing is computed in other steps, and the training is the same to the last bit with and without it.

    Args:
        every_n_steps: optimizer steps from one time to the next; None (the default) is the trainer's
            `log_every_n_steps`.
        progress_bar: which of the values (by its name without "commhooks/") stands in the progress bar, with the prefix
            "hook_". The default is shown as "hook_x": times fewer bytes. None: none.

    Raises:
        commhooks.HookConfigError: at construction, for a value that is none of these.
    """

    # `Optional` instead of `X | None`, because jsonargparse shows the annotations in `--help`.
    def __init__(
        self,
        every_n_steps: Optional[int] = None,  # noqa: UP045
        progress_bar: Optional[str] = "compression_rate",  # noqa: UP045
    ) -> None:
        super().__init__()
        check_value("every_n_steps", every_n_steps, int | None)
        check_choice("progress_bar", progress_bar, (None, *NAMES))
        self.every_n_steps = every_n_steps
        self.progress_bar = progress_bar
        self._warned = False
        self._meter = Meter()
        self._last_step = -1

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        check_twin(self, trainer)
        if stage == "fit" and not self._warned:
            self._warned = warn_if_unhooked(
                trainer, "CommHookMonitor has nothing to log: it logs what the hook of a CommHookDDP strategy does"
            )

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._last_step = -1

    def on_before_optimizer_step(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Any) -> None:
        # Here the gradients are averaged and unscaled, but not clipped. With several optimizers: at the first of a
        # batch.
        hook = hook_of(trainer)
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


def _x_axis(trainer: "pl.Trainer") -> int:
    """The step that `LightningModule.log` and Lightning's monitors use as x axis: private (lightning 2.6). Without it,
    the optimizers' steps, which are more if there are several of them."""
    return getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
