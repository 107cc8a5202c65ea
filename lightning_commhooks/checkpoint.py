"""Save the hook's state in the trainer's checkpoints.

A callback saves the state, because Lightning calls callbacks on every rank when it makes a full checkpoint.
`CommHookDDP.load_optimizer_state_dict` restores it: Lightning calls this method after the model is wrapped, only in fit
and only for full checkpoints. Therefore `validate(ckpt_path=...)` does not change the hook, and the learning-rate
finder, which restores its own checkpoint, also resets the hook.
"""

import contextlib
import inspect
import signal
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Optional

from commhooks import CommHook
from commhooks.hook.for_plugins import ARGUMENTS, check_arguments, located
from lightning_commhooks.hooked_strategy import HookedStrategy, hooked_strategy_of, keep_stats, warn, warn_if_unhooked
from lightning_commhooks.round_end import HookRoundEnd
from lightning_commhooks.twins import check_twin, unlike_the_trainer

if TYPE_CHECKING:
    import lightning.pytorch as pl

CHECKPOINT_KEY = "commhooks"
"""Key of the hook's state in Lightning's checkpoint dict."""

DEFAULT_SAVE_RESIDUAL: Literal["mean"] = "mean"
"""Lightning writes one file for all ranks, which should fit any number of ranks."""

PER_RANK_WARNING_BYTES = 2 * 10**9

SaveResidual = Literal["mean", "per_rank", "drop"]


def with_defaults(save_residual: object, strict: object) -> dict[str, object]:
    """The two arguments that strategy and callback share. None stands for the default."""
    return {
        "save_residual": DEFAULT_SAVE_RESIDUAL if save_residual is None else save_residual,
        "strict": ARGUMENTS["strict"].default if strict is None else strict,
    }


class HookCheckpoint(HookRoundEnd):
    """Saves the communication hook's state with the trainer's full checkpoints.

    `CommHookDDP` adds one by itself: give it explicitly only to set what it saves. Weights-only checkpoints hold no
    state of the hook.

    Args:
        save_residual: what is saved of PowerSGD's error memory. "mean" (the default): the mean over the ranks, one
            model-sized copy, good for any number of ranks; the run that saved and the run that resumes stay equal bit
            for bit. "per_rank": that of every rank, in the same file: as many model-sized copies as there are ranks.
            "drop": nothing.
        strict: whether resuming from a state of another hook or model is an error (the default), or gives what does
            not fit fresh memory and one warning.
    """

    # `Optional` instead of `X | None`, because jsonargparse shows the annotation in `--help`.
    def __init__(self, save_residual: Optional[SaveResidual] = None, strict: Optional[bool] = None) -> None:  # noqa: UP045
        super().__init__()
        check_arguments(with_defaults(save_residual, strict))
        self.save_residual = save_residual
        self.strict = strict
        self._warned_about_size = False
        self._warned_about_late = False

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        check_twin(self, trainer)
        mixed = unlike_the_trainer(trainer, [*callbacks, *trainer.loggers])
        if mixed is not None and stage == "fit":
            warn(mixed)
        warn_if_unhooked(trainer, "CommHookCheckpoint has nothing to save: it saves the hook of a CommHookDDP strategy")

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        strategy = hooked_strategy_of(trainer)
        hook = strategy.comm_hook if strategy is not None else None
        if strategy is None or hook is None or not strategy.hook_belongs_to(pl_module):
            return
        self._warn_about_size(strategy, hook, trainer.world_size)
        checkpoint[CHECKPOINT_KEY] = hook.state_dict(
            strategy.save_residual, gather=True, joint=not saves_alone(trainer)
        )

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        super().on_train_end(trainer, pl_module)
        keep_stats(trainer)

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 0 or self._warned_about_late:
            return
        strategy = hooked_strategy_of(trainer)
        late = strategy.parameters_unfrozen_after_wrap() if strategy is not None else []
        if late:
            self._warned_about_late = True
            warn(
                f"{len(late)} parameters (the first is {late[0]}) were frozen or missing when the model was wrapped in "
                "DistributedDataParallel and are trained now: DDP never averages their gradients, with a communication "
                "hook or without, and the ranks drift apart. Unfreeze before fit and set a learning rate of 0, or call "
                "fit again, which wraps the model anew."
            )

    def _warn_about_size(self, strategy: HookedStrategy, hook: CommHook, world_size: int) -> None:
        if strategy.save_residual != "per_rank" or self._warned_about_size:
            return
        size = hook.plan().memory.residual * world_size
        if size > PER_RANK_WARNING_BYTES:
            self._warned_about_size = True
            warn(
                f"save_residual='per_rank' puts about {size / 1e9:.1f} GB of residuals ({world_size} ranks) into every "
                "checkpoint, gathered on every rank; save_residual='mean' needs one copy of the model only"
            )


def naming(path: str | Path) -> contextlib.AbstractContextManager[None]:
    """Let errors about the hook's state name the checkpoint of Lightning that holds it, and say what to do there."""
    return located(
        f"{path}, key {CHECKPOINT_KEY!r}",
        "Resume Lightning from another checkpoint; or, to begin with fresh memory, torch.load this one, delete the "
        "key, and torch.save it",
    )


def saves_alone(trainer: "pl.Trainer") -> bool:
    """Whether other ranks may not take part in this save, so that it must not communicate.

    There are two cases. An exception on one rank: Lightning sets `trainer.interrupted` before it calls the callbacks'
    `on_exception`, in which ModelCheckpoint(save_on_exception=True) and OnExceptionCheckpoint save. A signal:
    Lightning's SLURM handler and users' handlers save between any two bytecodes of the main thread, with `interrupted`
    False. All other cases, such as a save inside `if trainer.is_global_zero`, or in a handler that has deleted its
    arguments, end at the time limit of the joint save and lose only the residuals.
    """
    return trainer.interrupted or in_signal_handler()


def in_signal_handler() -> bool:
    """Whether Python has called a function on the stack of this thread to handle a signal: with the number of a signal
    and the frame that was interrupted, which is then the frame that the function returns to. Which functions are
    registered says neither: programs call them directly, too, and a handler may have deregistered itself."""
    return any(_handles_signal(frame) for frame, _ in traceback.walk_stack(inspect.currentframe()))


def _handles_signal(frame: FrameType) -> bool:
    code = frame.f_code
    if frame.f_back is None or (code.co_argcount < 2 and not code.co_flags & inspect.CO_VARARGS):
        return False
    names, rest, _, values = inspect.getargvalues(frame)
    given = [values.get(name) for name in names]
    given += values[rest] if rest is not None and isinstance(values.get(rest), tuple) else ()
    if sys.version_info < (3, 13):
        values.clear()  # a copy, with which the frame would keep the caller's variables after they were deleted
    return any(
        interrupted is frame.f_back and isinstance(number, int) and number in signal.valid_signals()
        for number, interrupted in pairwise(given)
    )
