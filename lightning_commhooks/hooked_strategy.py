"""The interface of a strategy with a communication hook, for the callbacks."""

from typing import TYPE_CHECKING

from commhooks import CommHook

if TYPE_CHECKING:
    import lightning.pytorch as pl


class HookedStrategy:
    """Base of the strategies with a hook, by which the callbacks recognise them."""

    @property
    def comm_hook(self) -> CommHook | None:
        """The attached hook; None before the model is wrapped."""
        raise NotImplementedError

    @property
    def save_residual(self) -> str:
        """Which residuals checkpoints hold: "mean", "per_rank" or "drop"."""
        raise NotImplementedError

    def hook_belongs_to(self, module: "pl.LightningModule") -> bool:
        """Whether the hook was attached for this module, not for a module trained earlier."""
        raise NotImplementedError

    def parameters_unfrozen_after_wrap(self) -> list[str]:
        """Names of parameters that require a gradient now and did not when the model was wrapped."""
        raise NotImplementedError

    def warn_if_never_reached(self, trainer: "pl.Trainer") -> None:
        """Log a warning if this run ends before the hook begins to compress."""
        raise NotImplementedError


def hooked_strategy_of(trainer: "pl.Trainer") -> HookedStrategy | None:
    """The trainer's strategy if that is a `HookedStrategy`, else None."""
    return trainer.strategy if isinstance(trainer.strategy, HookedStrategy) else None
