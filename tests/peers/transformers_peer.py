"""Runs transformers' tests of saving and resuming on two CPU ranks, with `CommHookTrainer`, and the
script of its training parity test.

The tests expect one process: a folder for temporary files is the same on all ranks here. What needs
a download, peft or a GPU is left out.
"""

import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import peer_hooks
import pytest
import torch.distributed as dist
from suites import SOURCE, SUITES
from transformers import Trainer

from accelerate_commhooks.transformers import CommHookTrainer

TESTS = Path(os.environ[SOURCE], "tests")
PARITY = TESTS / "trainer/distributed/scripts/training_parity.py"
CLASSES = (
    "TrainerCheckpointSaveTest",
    "TrainerResumeTrainingTest",
    "TrainerInterruptedTrainingTest",
)

sys.path.insert(0, str(TESTS))

from trainer import (  # type: ignore[import-not-found]  # noqa: E402
    test_trainer_checkpointing,
    trainer_test_utils,
)


class HookedTrainer(CommHookTrainer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, hook=peer_hooks.config(), **options)

    def train(self, *args: Any, **options: Any) -> Any:
        result = super().train(*args, **options)
        assert self.comm_hook is not None, "the Trainer has wrapped no model in DDP"
        peer_hooks.keep(self.comm_hook)
        return result


class _OnTwoRanks:
    def setUp(self) -> None:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # tearDown of transformers deletes it
        super().setUp()  # type: ignore[misc]

    def get_auto_remove_tmp_dir(self, *_: Any, **__: Any) -> str:
        return peer_hooks.SharedFolder().name

    def check_trainer_state_are_the_same(self, *states: Any) -> None:
        """Only the first rank collects the state of callbacks, when it saves."""
        if dist.get_rank() == 0:
            super().check_trainer_state_are_the_same(*states)  # type: ignore[misc]

    def convert_to_sharded_checkpoint(self, folder: str) -> None:
        if dist.get_rank() == 0:
            super().convert_to_sharded_checkpoint(folder)  # type: ignore[misc]
        dist.barrier()


test_trainer_checkpointing.tempfile = types.SimpleNamespace(
    TemporaryDirectory=peer_hooks.SharedFolder
)
if peer_hooks.NAME:
    test_trainer_checkpointing.Trainer = trainer_test_utils.Trainer = HookedTrainer


def on_two_ranks(name: str) -> type:
    case = getattr(test_trainer_checkpointing, name)
    left_out = dict.fromkeys(SUITES["transformers"].left_out)
    return type(name, (_OnTwoRanks, case), {**left_out, "__module__": __name__})


globals().update({name: on_two_ranks(name) for name in CLASSES})


def losses(trainer: type) -> list[float]:
    folder = peer_hooks.SharedFolder().name
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with (
        # transformers 5.23 may have put another module there than the one that was imported first
        mock.patch.object(sys.modules["transformers"], "Trainer", trainer),
        mock.patch.object(sys, "argv", [str(PARITY), "--output_dir", folder]),
    ):
        script = runpy.run_path(str(PARITY), run_name="__main__")
    assert type(script["trainer"]) is trainer
    dist.barrier()
    result: list[float] = json.loads(Path(folder, "losses.json").read_text())
    return result


@pytest.mark.skipif(not PARITY.is_file(), reason=f"this version has no {PARITY.name}")
def test_training_parity() -> None:
    """transformers compares two launchers, to four decimal places; here it is two Trainers."""
    expected = losses(Trainer)
    assert len(expected) == 5
    ours = losses(HookedTrainer if peer_hooks.NAME else Trainer)
    assert ours == pytest.approx(expected, rel=0, abs=5e-5)
