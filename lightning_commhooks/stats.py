"""The numbers of a hook after a fit, also where it has ended with the processes that it lived in."""

from typing import TYPE_CHECKING, Any

from lightning_commhooks.hooked_strategy import hooked_strategy_of

if TYPE_CHECKING:
    import lightning.pytorch as pl

# A launcher that forks or spawns sends `trainer.state` of rank 0 back to the main process (lightning 2.6).
_ATTRIBUTE = "comm_hook_stats"


def hook_stats(trainer: "pl.Trainer") -> dict[str, Any] | None:
    """`trainer.strategy.comm_hook.stats()`. After a fit whose processes were forked or spawned, as in notebooks, where
    `comm_hook` is None in the main process: the numbers of rank 0 at the end of the training. None if there was no
    hook."""
    strategy = hooked_strategy_of(trainer)
    hook = strategy.comm_hook if strategy is not None else None
    return getattr(trainer.state, _ATTRIBUTE, None) if hook is None else hook.stats()


def keep_stats(trainer: "pl.Trainer") -> None:
    """Put the numbers where `hook_stats` finds them when the processes have ended. Call at the end of a training."""
    setattr(trainer.state, _ATTRIBUTE, hook_stats(trainer))
