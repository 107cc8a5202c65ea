"""A hook in a folder of its own, beside a model that was saved with `torch.distributed.checkpoint`: for the plugins."""

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

_REMEDY = "Load another checkpoint, or remove this folder to continue with fresh memory"


def nothing_saved(place: object, why: str, hook: str) -> str:
    """A warning for a load from `place`, where the hook of this name has no state, because of `why`."""
    return (
        f"{place} holds no state of a communication hook ({why}): hook {hook!r} goes on with the memory that it has, "
        "which is none in a new run."
    )


class HookFolder:
    """The folder of one hook. All ranks must call each of its methods, together.

    Args:
        path: the same on all ranks, in a file system that they share.
        front_end: the class that users configure, for messages.
        broadcast: returns on every rank what rank 0 has given to it.

    Attributes:
        last_file: the one that a save writes last; without it nothing is loaded.
    """

    def __init__(self, path: Path, front_end: str, broadcast: Callable[[Any], Any]) -> None:
        self._path, self._front_end, self._broadcast = path, front_end, broadcast
        self.last_file = path / ".metadata"  # of DCP

    def remove(self) -> None:
        """Before other weights replace those that it belongs to. A file in place of the checkpoint goes, too.

        Raises:
            HookRunError: it is still there, and would be loaded.
        """
        failed = ""
        if dist.get_rank() == 0:
            try:
                if self._path.parent.is_file():  # each rank of Lightning 2.6 would remove it, and all but one fail
                    self._path.parent.unlink()
                self.last_file.unlink(missing_ok=True)
            except OSError as error:
                failed = str(error)
            else:
                shutil.rmtree(self._path, ignore_errors=True)
        if failed := self._broadcast(failed):
            raise HookRunError(
                f"the hook's state in the checkpoint at {self._path.parent} cannot be replaced: {failed}. Remove it, "
                "or save to another path"
            )

    def is_complete(self) -> bool:
        """Whether a save has come to its end here."""
        return bool(self._broadcast(self.last_file.is_file()))

    def save(self, hook: CommHook) -> None:
        dcp.save({"hook": hook}, checkpoint_id=self._path)

    def prepare_load(self, hook: CommHook, *, strict: bool) -> Callable[[], None]:
        """Read and check what `save` has written. Returns a function that lets `hook` take it over.

        Raises:
            PayloadError: it cannot be read; with `strict` also if it is of another hook, or has no residuals.
        """
        planner, content = _PlainPlanner(allow_partial_load=not strict), {"hook": hook.state_dict()}
        try:
            dcp.load(content, checkpoint_id=self._path, planner=planner)
        except CheckpointException as error:  # a BaseException in torch 2.13
            reason, _ = next(iter(error.failures.values()))
            if strict and "Missing key" in str(reason):
                raise PayloadError(
                    f"{self._path} does not hold all that hook {hook.name!r} remembers: it was saved by another hook, "
                    f"or with save_residual='drop'. Use that hook, or {self._front_end}(save_residual='drop'), or "
                    f"begin with what is missing fresh: {self._front_end}(strict=False)"
                ) from error
            why = (str(reason).splitlines() or [""])[0]  # more would advise to run what is in it
            raise PayloadError(f"{self._path} cannot be read ({type(reason).__name__}: {why}). {_REMEDY}") from error
        with errors_begin_with(self._path, remedy=_REMEDY):
            return hook.prepare_load(content["hook"], strict)


class _PlainPlanner(DefaultLoadPlanner):
    """torch 2.13 reads what is no tensor as a pickle that may run code; here only plain types are accepted."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
