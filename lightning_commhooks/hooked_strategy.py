"""What the callbacks ask of a strategy that has a communication hook."""

import lightning.pytorch as pl

from commhooks import CommHook


class HookedStrategy:
    """Base of the strategies with a hook. The callbacks know a strategy by it."""

    @property
    def comm_hook(self) -> CommHook | None:
        """The attached hook; None before the model is wrapped."""
        raise NotImplementedError

    @property
    def save_residual(self) -> str:
        """What checkpoints hold of the residuals."""
        raise NotImplementedError

    def hook_belongs_to(self, module: pl.LightningModule) -> bool:
        """Whether the hook was attached for this module, not for one that was trained before it."""
        raise NotImplementedError

    def parameters_unfrozen_after_wrap(self) -> list[str]:
        """Names of parameters that require a gradient now and did not when the model was wrapped."""
        raise NotImplementedError

    def warn_if_never_reached(self, trainer: pl.Trainer) -> None:
        """Say that this run ends before the hook begins to compress."""
        raise NotImplementedError


def hooked_strategy_of(trainer: pl.Trainer) -> HookedStrategy | None:
    """The trainer's strategy if it has a hook."""
    return trainer.strategy if isinstance(trainer.strategy, HookedStrategy) else None
