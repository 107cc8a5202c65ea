"""The classes of `lightning_commhooks` for the Trainer of the package `pytorch_lightning`, and
their strategy names.
"""

from lightning_commhooks.callbacks import CheckpointMixin, MonitorMixin, RoundEndMixin, hook_stats
from lightning_commhooks.fsdp2 import HookedFSDP2
from lightning_commhooks.packages import check_installed, register_names
from lightning_commhooks.strategy import HookedDDP

check_installed("pytorch_lightning")

from pytorch_lightning import Callback  # noqa: E402
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry  # noqa: E402

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]


class CommHookCheckpoint(CheckpointMixin, Callback):  # type: ignore[misc]
    """The `CommHookCheckpoint` of `lightning_commhooks`, for `pytorch_lightning`."""


class CommHookRoundEnd(RoundEndMixin, Callback):  # type: ignore[misc]
    """The `CommHookRoundEnd` of `lightning_commhooks`, for `pytorch_lightning`."""


class CommHookMonitor(MonitorMixin, Callback):  # type: ignore[misc]
    """The `CommHookMonitor` of `lightning_commhooks`, for `pytorch_lightning`."""


class CommHookDDP(HookedDDP, DDPStrategy):  # type: ignore[misc]
    """The `CommHookDDP` of `lightning_commhooks`, for `pytorch_lightning`."""

    package = "pytorch_lightning"
    checkpoint_callback = CommHookCheckpoint
    round_end_callback = CommHookRoundEnd


class CommHookFSDP2(HookedFSDP2, ModelParallelStrategy):  # type: ignore[misc]
    """The `CommHookFSDP2` of `lightning_commhooks`, for `pytorch_lightning`."""

    package = "pytorch_lightning"
    checkpoint_callback = CommHookCheckpoint
    round_end_callback = CommHookRoundEnd


register_names(StrategyRegistry, CommHookDDP)
