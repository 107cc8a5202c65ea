"""Runs Accelerate's tests of saving and resuming on two CPU ranks, with a hook of ours in every
Accelerator. The ranks share the temporary folders, which each test of one process makes for itself.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import accelerate_peer
import peer_hooks
import torch.distributed as dist
from suites import SOURCE

if peer_hooks.NAME:
    accelerate.Accelerator = accelerate_peer.HookedAccelerator  # type: ignore[misc]


class SharedFolder:
    """In place of `tempfile.TemporaryDirectory`."""

    def __init__(self) -> None:
        names = [tempfile.mkdtemp() if accelerate.PartialState().is_main_process else None]
        dist.broadcast_object_list(names)
        self.name = str(names[0])

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: Any) -> None:
        accelerate.PartialState().wait_for_everyone()
        shutil.rmtree(self.name, ignore_errors=True)


accelerate.PartialState(cpu=True)
sys.path.insert(0, str(Path(os.environ[SOURCE], "tests")))
import test_state_checkpointing as peer  # type: ignore[import-not-found]  # noqa: E402


class _Tempfile:
    TemporaryDirectory = SharedFolder


peer.tempfile = _Tempfile
globals().update(
    {name: test for name, test in vars(peer).items() if name.startswith("CheckpointTest_")}
)
