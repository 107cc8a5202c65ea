"""The strategies and callbacks for the Trainer of `pytorch_lightning`."""

from commhooks.errors import needed
from lightning_commhooks.checkpoint import HookCheckpoint
from lightning_commhooks.fsdp2 import HookedFSDP2
from lightning_commhooks.hooked_strategy import hook_stats
from lightning_commhooks.monitor import HookMonitor
from lightning_commhooks.registry import register_strategy_names
from lightning_commhooks.round_end import HookRoundEnd
from lightning_commhooks.strategy import HookedDDP

with needed(
    "pytorch_lightning",
    sentence="this needs the package pytorch_lightning: pip install pytorch-lightning. For lightning.pytorch write "
    "`from lightning_commhooks import ...`",
):
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]


class CommHookCheckpoint(HookCheckpoint, Callback):  # type: ignore[misc]
    __doc__ = HookCheckpoint.__doc__


class CommHookRoundEnd(HookRoundEnd, Callback):  # type: ignore[misc]
    __doc__ = HookRoundEnd.__doc__


class CommHookMonitor(HookMonitor, Callback):  # type: ignore[misc]
    __doc__ = HookMonitor.__doc__


class CommHookDDP(HookedDDP, DDPStrategy):  # type: ignore[misc]
    __doc__ = HookedDDP.__doc__
    checkpoint_callback = CommHookCheckpoint


class CommHookFSDP2(HookedFSDP2, ModelParallelStrategy):  # type: ignore[misc]
    __doc__ = HookedFSDP2.__doc__
    round_end_callback = CommHookRoundEnd


register_strategy_names(StrategyRegistry, CommHookDDP)
