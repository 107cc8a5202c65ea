"""The classes of `lightning_commhooks` for the Trainer of the package `pytorch_lightning`."""

from lightning_commhooks.callbacks import hook_stats
from lightning_commhooks.class_factory import trainer_classes

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]

_classes = trainer_classes("pytorch_lightning")
CommHookCheckpoint = _classes["CommHookCheckpoint"]
CommHookDDP = _classes["CommHookDDP"]
CommHookFSDP2 = _classes["CommHookFSDP2"]
CommHookMonitor = _classes["CommHookMonitor"]
CommHookRoundEnd = _classes["CommHookRoundEnd"]
