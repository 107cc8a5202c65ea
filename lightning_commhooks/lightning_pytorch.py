"""The classes of `lightning_commhooks` for the Trainer of `lightning.pytorch`, and their strategy
names.
"""

from lightning_commhooks.callbacks import CheckpointMixin, MonitorMixin, RoundEndMixin, hook_stats
from lightning_commhooks.fsdp2 import HookedFSDP2
from lightning_commhooks.packages import check_installed, register_names
from lightning_commhooks.strategy import HookedDDP

check_installed("lightning.pytorch")

from lightning.pytorch import Callback  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry  # noqa: E402

__all__ = ["CommHookCheckpoint", "CommHookDDP", "CommHookFSDP2", "CommHookMonitor", "hook_stats"]


class CommHookCheckpoint(CheckpointMixin, Callback):
    """Sets `save_residual` and `strict` of `CommHookDDP`, for users who prefer a callback.
    `CommHookDDP` saves its hook in full checkpoints with or without this callback; weights-only
    checkpoints contain no state of the hook.

    Args:
        save_residual: which residuals (PowerSGD's error memory) are saved. "mean" (the default):
            the mean over the ranks, one model-sized copy, for any number of ranks; the saving run
            and the resumed run stay bit-equal. "per_rank": every rank's residual, in the same file:
            as many model-sized copies as ranks. "drop": none.
        strict: whether resuming from a state of another hook or model is an error (the default). If
            False, parts that do not fit start with fresh state, and rank 0 warns once.

    Raises:
        commhooks.HookConfigError: at construction, for an invalid value. When the Trainer starts,
            if the strategy was given a different value, or if there are two of these callbacks.
    """


class CommHookRoundEnd(RoundEndMixin, Callback):
    """Ends the hook's round, the local steps between two averages of the weights, before other
    callbacks read the model. The strategies insert this callback as the first, and end rounds
    themselves before a checkpoint.
    """


class CommHookMonitor(MonitorMixin, Callback):
    """Logs the metrics of the hook of a `CommHookDDP` or `CommHookFSDP2` strategy with all loggers
    of the Trainer.

        Trainer(strategy=CommHookDDP(hook="powerSGD"), callbacks=[CommHookMonitor()])

    docs/working.md explains the metrics. Rank 0 logs its own values. Nothing is computed in other
    steps, and the weights are bit-equal with and without this callback.

    Args:
        every_n_steps: log every n optimizer steps; None (the default) is the Trainer's
            `log_every_n_steps`.
        progress_bar: name, without "commhooks/", of the metric that the progress bar shows as
            "hook_NAME". The default, the compression rate, is shown as "hook_x". None: no metric.

    Raises:
        commhooks.HookConfigError: at construction, for another value.
    """


class CommHookDDP(HookedDDP, DDPStrategy):
    """Trains with `DDPStrategy` and a communication hook, on every device, and saves the hook in
    the Trainer's checkpoints. With `hook=None` it is plain DDP, for comparisons: `comm_hook` stays
    None, and checkpoints hold no state of a hook.

    Args:
        hook, hook_options, hook_state, wrapper, strict, check_every, ranks_per_node, members: as in
            `commhooks.attach`. A machine that comes (`members`) also takes the Trainer's epoch,
            batch and global step, and the learning rate schedulers. One that ends, or gets SIGTERM,
            leaves (`Members.leave`).
        save_residual: which residuals checkpoints hold; see `CommHookCheckpoint`. Default "mean".
        ddp_kwargs: arguments of `DDPStrategy` and `DistributedDataParallel`.

    Raises:
        commhooks.HookConfigError: at construction, for an unknown hook, option or argument (the
            message offers the closest name), a value of the wrong type, or an invalid combination.
    """

    package = "lightning.pytorch"
    checkpoint_callback = CommHookCheckpoint
    round_end_callback = CommHookRoundEnd


class CommHookFSDP2(HookedFSDP2, ModelParallelStrategy):
    """Trains replicas of a model that `ModelParallelStrategy` shards, and averages over the
    replicas by a hook. The Trainer's checkpoints are distributed (a folder) and contain the hook's
    state.

    `configure_model` of the LightningModule shards the model over
    `self.trainer.strategy.device_mesh["shard"]`; the last call of `fully_shard` is for a module
    that contains all others.

    Args:
        hook: as in `CommHookDDP`, but not a callable; None averages the replicas without
        compression. hook_options, wrapper, strict, check_every: as in `commhooks.attach`.
        members: as in `CommHookDDP`; every machine trains a replica.
        shards: as in `commhooks.attach`.
        replicate_size: number of replicas of the model, each sharded over `world size /
            replicate_size` consecutive ranks. "auto": one per machine; with `shards` and without a
            hook, one.
        save_residual: "drop" saves no residuals. None: their mean over the replicas.
        process_group_backend, timeout: as in `ModelParallelStrategy`.

    Raises:
        commhooks.HookConfigError: at construction, as in `CommHookDDP`.
    """

    package = "lightning.pytorch"
    checkpoint_callback = CommHookCheckpoint
    round_end_callback = CommHookRoundEnd


register_names(StrategyRegistry, CommHookDDP)
