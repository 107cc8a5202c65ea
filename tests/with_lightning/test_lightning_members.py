"""Machines that come and go under Lightning and Fabric."""

import copy
import csv
import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_commhooks.strategy import _Progress
from tests.support import lightning_support as support
from tests.support.machines import (
    FRONT_JOB,
    Machine,
    assert_equal,
    lighthouse,
    one_comes_and_is_killed,
    one_gets_sigterm,
    one_is_slower,
)

pytestmark = pytest.mark.timeout(180)


def test_a_machine_joins_a_trainer_and_is_killed(tmp_path: Path) -> None:
    """A machine that comes, with a sharded model, takes weights, optimizer, schedulers, epoch and
    steps from the other one, which goes on to the end alone. Validations and saves in mid-round
    change no weights.
    """
    settings = {"front": "lightning", "steps": 70, "world": 2, "save_every": 21}
    a, b, _ = one_comes_and_is_killed(tmp_path, "lightning.pytorch", **settings)
    assert all(
        line["same"] for machine in (a, b) for line in machine.lines if line["what"] == "validation"
    )
    logged = {
        row["commhooks/members"] for row in csv.DictReader((tmp_path / "a" / "metrics.csv").open())
    }
    assert {"1.0", "2.0"} <= logged
    log = a.log.read_text()
    assert log.count("marked inexact") == 1, log
    assert "nothing is sent" not in log and "UnusedWarning" not in log, log


def test_machines_resume_from_their_checkpoints(tmp_path: Path) -> None:
    """Two machines save and stop. From these checkpoints go on: one machine, as a training without
    members does (in which validations and the ends of epochs would end rounds); and two, of which
    one has an older checkpoint, and takes the state of the other.
    """
    one_epoch = {"samples": 200, "validation": 0.0}

    def train(names: str, steps: int, files: list[str], **more: Any) -> list[Machine]:
        with lighthouse() as address:
            new = functools.partial(
                Machine, FRONT_JOB, address, tmp_path, steps=steps, save_every=10, **one_epoch
            )
            paths = [str(tmp_path / file) for file in files] or [None] * len(names)
            many = [
                new(
                    name,
                    "lightning.pytorch",
                    front="lightning",
                    seed=seed,
                    least=len(names),
                    resume=path,
                    **more,
                )
                for seed, (name, path) in enumerate(zip(names, paths, strict=True))
            ]
            try:
                assert [machine.end()["steps"] for machine in many] == [steps] * len(many)
            finally:
                for machine in many:
                    machine.kill()
        return many

    first = train("ab", 20, [])
    assert_equal(*first, began_together=True)
    (alone,) = train("d", 40, ["a/step=20.ckpt"])
    (plain,) = train("p", 40, ["a/step=20.ckpt"], data="d", members=False)
    assert [*plain.rounds][-4:] == [5, 6, 7, 8]
    assert {step: line | {"names": ["d"]} for step, line in plain.rounds.items()} == alone.rounds
    two = train("ef", 40, ["a/step=20.ckpt", "b/step=10.ckpt"])
    assert_equal(*two, began_together=True)
    for machine in (alone, *two):
        assert [machine.rounds[step]["steps"] for step in (5, 6, 7, 8)] == [25, 30, 35, 40]
    assert "goes on from outer step" in two[1].log.read_text()


def test_a_slow_machine_follows_the_progress_of_the_others(tmp_path: Path) -> None:
    one_is_slower(tmp_path, "lightning.pytorch", front="lightning")


def test_a_machine_joins_fabric_and_is_killed(tmp_path: Path) -> None:
    one_comes_and_is_killed(tmp_path, "lightning.pytorch", front="fabric", steps=70)


def test_a_machine_that_gets_sigterm_ends_the_round_first(tmp_path: Path) -> None:
    """A spot instance that is taken away. It, too, takes the progress of the other one, and
    validates in mid-round.
    """
    a, end = one_gets_sigterm(tmp_path, "lightning.pytorch", front="lightning")
    assert end["ended_by"] == "SIGTERMException"
    validations = [line["same"] for line in a.lines if line["what"] == "validation"]
    assert len(validations) > 2 and all(validations)


class _Follows(support.Model):
    """Keeps the progress at the first batch of epoch 1, or takes another one's at batch 2 of epoch
    0.
    """

    def __init__(self, taken: Any = None) -> None:
        super().__init__()
        self.taken = taken
        self.kept: Any = None
        self.batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        progress = _Progress(self.trainer)
        place = self.trainer.current_epoch, batch_idx
        if place == (1, 0):
            self.kept = copy.deepcopy(progress.state_dict())
        if place == (0, 2) and self.taken is not None:
            progress.load_state_dict(self.taken)
        self.batches += 1
        return super().training_step(batch, batch_idx)


def test_a_machine_that_follows_another_one_into_an_epoch_trains_all_of_it(tmp_path: Path) -> None:
    """Though its own pass over the data, which began with the epoch before, ends sooner."""
    new_trainer = functools.partial(
        pl.Trainer,
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    fast = _Follows()
    new_trainer().fit(fast, support.data())
    slow = _Follows(fast.kept)
    new_trainer().fit(slow, support.data())
    assert (fast.batches, slow.batches) == (8, 2 + 4)
