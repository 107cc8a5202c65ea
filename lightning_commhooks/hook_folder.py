"""The folder of the hook in a distributed checkpoint of Lightning."""

import contextlib
import io
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from commhooks import CommHook, PayloadError
from lightning_commhooks.checkpoint import CHECKPOINT_KEY


class HookFolder:
    """`commhooks/` below the folder of the checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._path = checkpoint / CHECKPOINT_KEY
        self._last_file = self._path / ".metadata"  # that DCP writes

    def remove(self) -> None:
        """Before other weights replace those that it belongs to. One rank calls this.

        Raises:
            OSError: it is still there, and would be loaded.
        """
        with contextlib.suppress(NotADirectoryError):  # the checkpoint is a file, which Lightning replaces
            self._last_file.unlink(missing_ok=True)
        shutil.rmtree(self._path, ignore_errors=True)

    @property
    def is_complete(self) -> bool:
        return self._last_file.is_file()

    def save(self, hook: CommHook) -> None:
        """All ranks must call this."""
        dcp.save({"hook": hook}, checkpoint_id=self._path)

    def load(self, hook: CommHook, *, strict: bool) -> None:
        """All ranks must call this.

        Raises:
            PayloadError: it cannot be read; with `strict` also if it is of another hook, or has no residuals.
        """
        planner = _PlainPlanner(allow_partial_load=not strict)
        try:
            dcp.load({"hook": hook}, checkpoint_id=self._path, planner=planner)
        except CheckpointException as error:  # a BaseException in torch 2.13
            reason, _ = next(iter(error.failures.values()))
            if strict and "Missing key" in str(reason):
                raise PayloadError(
                    f"{self._path} does not hold all that hook {hook.name!r} remembers: it was saved by another hook, "
                    "or with save_residual='drop'. Use that hook, or CommHookFSDP2(save_residual='drop'), or begin "
                    "with what is missing fresh: CommHookFSDP2(strict=False)"
                ) from error
            raise PayloadError(f"{self._path} cannot be read: {reason}") from error


class _PlainPlanner(DefaultLoadPlanner):
    """torch 2.13 reads what is no tensor as a pickle that may run code; here only plain types are accepted."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
