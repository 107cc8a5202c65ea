"""The hook's part of Lightning's checkpoints: key, defaults, whether all ranks take part."""

import inspect
import sys
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from commhooks.errors import errors_begin_with
from commhooks.hook.plugin_api import ARGUMENTS

if TYPE_CHECKING:
    import lightning.pytorch as pl

CHECKPOINT_KEY = "commhooks"
"""Key of the hook's state in Lightning's checkpoint dict."""

SaveResidual = Literal["mean", "per_rank", "drop"]
DEFAULT_SAVE_RESIDUAL: Literal["mean"] = "mean"
"""Lightning writes one file, from which any number of ranks should be able to resume."""
PER_RANK_WARNING_BYTES = 2 * 10**9


def with_defaults(save_residual: object, strict: object) -> dict[str, object]:
    return {
        "save_residual": DEFAULT_SAVE_RESIDUAL if save_residual is None else save_residual,
        "strict": ARGUMENTS["strict"].default if strict is None else strict,
    }


def errors_name_checkpoint(path: str | Path) -> AbstractContextManager[None]:
    return errors_begin_with(
        f"{path}, key {CHECKPOINT_KEY!r}",
        remedy=(
            "Resume Lightning from another checkpoint; or, to begin with fresh state, torch.load"
            " this one, delete the key, and torch.save it"
        ),
    )


def saves_alone(trainer: "pl.Trainer") -> bool:
    """Return whether some ranks might not join this save, so that it must not use collectives.

    After an exception on one rank Lightning sets `trainer.interrupted` before it calls the
    callbacks that save (`on_exception`). It has no public flag for a save in a signal handler
    (SLURM's, or a user's). In all other cases, such as a save inside `if trainer.is_global_zero`,
    the joint save ends at its time limit and loses only the residuals.
    """
    return trainer.interrupted or in_signal_handler()


def in_signal_handler() -> bool:
    """Return whether this thread runs a signal handler.

    Python calls `handler(number, frame)` with the interrupted frame, which is also the caller's
    frame.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        code = frame.f_code
        takes_two = code.co_argcount >= 2 or code.co_flags & inspect.CO_VARARGS
        if frame.f_back is None or not takes_two:
            continue
        names, rest, _, values = inspect.getargvalues(frame)
        arguments = [values.get(name) for name in names]
        further = values.get(rest or "")
        if isinstance(further, tuple):
            arguments += further
        if sys.version_info < (3, 13):
            # this copy would keep the caller's variables alive after they were deleted
            values.clear()
        if any(argument is frame.f_back for argument in arguments):
            return True
    return False
