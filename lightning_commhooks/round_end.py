"""The callback that ends the round of a hook that averages weights, before others look at the model."""

from typing import TYPE_CHECKING, Any

from lightning_commhooks.hooked_strategy import hooked_strategy_of
from lightning_commhooks.twins import Callback

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HookRoundEnd(Callback):
    """The strategies put it first in the Trainer's list of callbacks. Before the Trainer reads the model for a
    checkpoint it asks the strategy, which ends the round, too."""

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        _end_round(trainer)


def put_first(trainer: "pl.Trainer", kind: type[HookRoundEnd]) -> HookRoundEnd:
    """Let the callback of this class, made if there is none, be the first of the trainer. Returns it."""
    # `trainer.callbacks` is an ordinary list; Lightning itself appends to it.
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    first = next((each for each in callbacks if isinstance(each, kind)), None) or kind()
    callbacks[:] = [first, *(each for each in callbacks if each is not first)]
    return first


def _end_round(trainer: "pl.Trainer") -> None:
    strategy = hooked_strategy_of(trainer)
    if strategy is not None:
        strategy.end_round()
