"""Machines that come and go under Lightning and Fabric."""

import csv
from pathlib import Path

import pytest

from tests.support.machines import one_comes_and_is_killed, one_gets_sigterm

pytestmark = pytest.mark.timeout(180)


def test_trainer(tmp_path: Path) -> None:
    """A machine that comes takes weights, optimizer, schedulers, epoch and steps from the other one, which goes on to
    the end alone. Validations and saves in mid-round change no weights."""
    a, b, _ = one_comes_and_is_killed(tmp_path, "lightning.pytorch", front="lightning", steps=170)
    assert all(line["same"] for each in (a, b) for line in each.lines if line["what"] == "validation")
    logged = {row["commhooks/members"] for row in csv.DictReader((tmp_path / "a" / "metrics.csv").open())}
    assert {"1.0", "2.0"} <= logged
    log = a.log.read_text()
    assert log.count("marked inexact") == 1, log
    assert "nothing is sent" not in log and "UnusedWarning" not in log, log


def test_trainer_with_sharded_models(tmp_path: Path) -> None:
    one_comes_and_is_killed(tmp_path, "lightning.pytorch", front="lightning", steps=170, world=2)


def test_fabric(tmp_path: Path) -> None:
    one_comes_and_is_killed(tmp_path, "lightning.pytorch", front="fabric", steps=170)


def test_sigterm(tmp_path: Path) -> None:
    """A spot instance that is taken away."""
    assert one_gets_sigterm(tmp_path, "lightning.pytorch", front="lightning")["ended_by"] == "SIGTERMException"
