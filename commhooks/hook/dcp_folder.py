"""Save a hook's state to a folder with `torch.distributed.checkpoint` (DCP), for the plugins."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from commhooks.errors import HookRunError, PayloadError, errors_begin_with
from commhooks.hook.comm_hook import CommHook

_REMEDY = "Load another checkpoint, or remove this folder to continue with fresh state"


def nothing_saved(place: object, why: str, hook: str) -> str:
    return (
        f"{place} holds no state of a communication hook ({why}): hook {hook!r} continues with its"
        " current state, which is empty in a new run."
    )


class DCPFolder:
    """Saves and loads one hook. All ranks must call each method.

    Args:
        path: equal on all ranks, in a shared file system.
        front_end: the class that users configure, for messages.
        broadcast: returns rank 0's argument on every rank.
    """

    def __init__(self, path: Path, front_end: str, broadcast: Callable[[Any], Any]) -> None:
        self._path = path
        self._front_end = front_end
        self._broadcast = broadcast
        # DCP writes it last: without it the save was interrupted
        self.last_file = path / ".metadata"

    def remove(self) -> None:
        """Remove the folder before new weights replace the model's checkpoint. If the checkpoint's
        path is a file, remove it, too. Raises HookRunError if the old state could not be removed
        and would be loaded later.
        """
        failed = ""
        if dist.get_rank() == 0:
            try:
                # in Lightning 2.6 every rank removes it, and all but one fail
                if self._path.parent.is_file():
                    self._path.parent.unlink()
                self.last_file.unlink(missing_ok=True)
            except OSError as error:
                failed = str(error)
            else:
                shutil.rmtree(self._path, ignore_errors=True)
        if failed := self._broadcast(failed):
            raise HookRunError(
                f"the hook's state in the checkpoint at {self._path.parent} cannot be replaced:"
                f" {failed}. Remove it, or save to another path"
            )

    def is_complete(self) -> bool:
        return bool(self._broadcast(self.last_file.is_file()))

    def save(self, hook: CommHook) -> None:
        dcp.save({"hook": hook}, checkpoint_id=self._path)

    def prepare_load(self, hook: CommHook, *, strict: bool) -> Callable[[], None]:
        """Read and check the saved state without changing `hook`, and return a function that
        applies it. Raises PayloadError if the state cannot be read; with `strict`, also if another
        hook saved it, or if it has no residuals.
        """
        planner = _PlainPlanner(allow_partial_load=not strict)
        content = {"hook": hook.state_dict()}
        try:
            dcp.load(content, checkpoint_id=self._path, planner=planner)
        except CheckpointException as error:  # a BaseException in torch 2.13
            reason, _ = next(iter(error.failures.values()))
            if strict and "Missing key" in str(reason):
                raise PayloadError(
                    f"{self._path} lacks learned state that hook {hook.name!r} needs: it was saved"
                    " by another hook, or with save_residual='drop'. Use that hook, or"
                    f" {self._front_end}(save_residual='drop'), or start the missing state fresh:"
                    f" {self._front_end}(strict=False)"
                ) from error
            # torch's next lines advise to unpickle it without checks
            why = (str(reason).splitlines() or [""])[0]
            raise PayloadError(
                f"{self._path} cannot be read ({type(reason).__name__}: {why}). {_REMEDY}"
            ) from error
        with errors_begin_with(self._path, remedy=_REMEDY):
            return hook.prepare_load(content["hook"], strict)


class _PlainPlanner(DefaultLoadPlanner):
    """Loads plain types only. Otherwise torch 2.13 unpickles everything that is not a tensor, which
    may run code.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
