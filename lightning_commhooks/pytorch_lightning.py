"""The strategies and callbacks for the Trainer of `pytorch_lightning`."""

try:
    import pytorch_lightning
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
except ModuleNotFoundError as error:
    if error.name != "pytorch_lightning":
        raise
    raise ImportError(
        "this needs the package pytorch_lightning: pip install pytorch-lightning. For lightning.pytorch write "
        "`from lightning_commhooks import ...`"
    ) from error

from commhooks.hook.for_plugins import check_version
from lightning_commhooks.checkpoint import HookCheckpoint
from lightning_commhooks.fsdp2 import HookedFSDP2
from lightning_commhooks.monitor import HookMonitor
from lightning_commhooks.registry import register_strategy_names
from lightning_commhooks.stats import hook_stats
from lightning_commhooks.strategy import HookedDDP

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]

check_version(pytorch_lightning)


class CommHookCheckpoint(HookCheckpoint, Callback):  # type: ignore[misc]
    __doc__ = HookCheckpoint.__doc__


class CommHookMonitor(HookMonitor, Callback):  # type: ignore[misc]
    __doc__ = HookMonitor.__doc__


class CommHookDDP(HookedDDP, DDPStrategy):  # type: ignore[misc]
    __doc__ = HookedDDP.__doc__
    checkpoint_callback = CommHookCheckpoint


class CommHookFSDP2(HookedFSDP2, ModelParallelStrategy):  # type: ignore[misc]
    __doc__ = HookedFSDP2.__doc__


register_strategy_names(StrategyRegistry, CommHookDDP)
