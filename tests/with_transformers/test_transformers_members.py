"""Machines that come and go under `CommHookTrainer`."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from tests.support.machines import one_comes_and_is_killed, one_gets_sigterm, one_is_slower  # noqa: E402


@pytest.mark.timeout(180)
def test_a_machine_comes_and_is_killed(tmp_path: Path) -> None:
    """It takes weights, optimizer, scheduler and the global step from the other one, which goes on
    to the end alone, and trains the last steps once more from its checkpoint. Evaluations and saves
    in mid-round change no weights.
    """
    a, b, end = one_comes_and_is_killed(
        tmp_path, "transformers.trainer", front="transformers", steps=70
    )
    validations = [
        line["same"] for machine in (a, b) for line in machine.lines if line["what"] == "validation"
    ]
    assert len(validations) > 8 and all(validations)
    assert end["again"] == [70, 14]  # the last round is shorter
    log = a.log.read_text()
    assert log.count("marked inexact") == 3, log  # by a hook in each training, and by the load
    assert "nothing is sent" not in log and "Warning" not in log, log


@pytest.mark.timeout(180)
def test_a_machine_that_gets_sigterm_ends_the_round_first(tmp_path: Path) -> None:
    """With the Trainer's own handling of SIGTERM, which saves first."""
    one_gets_sigterm(tmp_path, "transformers.trainer", front="transformers")
    assert any((tmp_path / "b").glob("checkpoint-*/trainer_state.json"))


def test_a_slow_machine_follows_the_progress_of_the_others(tmp_path: Path) -> None:
    one_is_slower(tmp_path, "transformers.trainer", front="transformers")
