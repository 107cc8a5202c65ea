"""`examples/accelerate_fsdp2.py` trains, saves and goes on from its checkpoint with what the hook has learned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate_fsdp2  # of examples/
from accelerate.state import AcceleratorState

from tests.support.accelerators import launched
from tests.support.features import fully_shard_on_gloo

pytestmark = fully_shard_on_gloo
STEPS = 12  # of an epoch


@launched
def _run(folder: str) -> None:
    for epochs in ("1", "2"):
        AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
        with mock.patch.object(sys, "argv", ["accelerate_fsdp2.py", "--folder", folder, "--epochs", epochs]):
            accelerate_fsdp2.main()


def test_the_example_goes_on(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_run, str(tmp_path), world_size=4)
    stats = json.loads((tmp_path / "result.json").read_text())["stats"]
    assert stats["backward_passes"] == STEPS and stats["step"] == 2 * STEPS
    assert stats["compressed_steps"] == STEPS and stats["compression_rate"] > 10
    assert [path.name for path in tmp_path.glob("epoch_*")] == ["epoch_2"]
    assert (tmp_path / "epoch_2" / "comm_hook" / ".metadata").is_file()
