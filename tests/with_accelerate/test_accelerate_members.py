"""Machines that come and go under Accelerate, whose machines of one process have no DDP."""

from pathlib import Path

import pytest

from tests.support.machines import one_comes_and_is_killed, one_gets_sigterm


@pytest.mark.timeout(180)
def test_a_machine_comes_and_is_killed(tmp_path: Path) -> None:
    """It takes weights, optimizer, prepared scheduler, and what the script has registered, from the
    other one, with settings from YAML, which goes on to the end alone. Batches that only accumulate
    gradients do not count. A save in mid-round changes no weights, and loads.
    """
    a, b, end = one_comes_and_is_killed(tmp_path, "accelerate", front="accelerate", steps=70)
    saved = [
        line["same"] for machine in (a, b) for line in machine.lines if line["what"] == "saved"
    ]
    assert len(saved) > 1 and all(saved)
    assert end["same"] and end["loaded"] == end["round"] - 1
    log = a.log.read_text()
    assert log.count("marked inexact") == 2, log  # by the save, and by the load of it
    assert "nothing is sent" not in log and "Warning" not in log, log


@pytest.mark.timeout(180)
def test_machines_with_sharded_models_come_and_go(tmp_path: Path) -> None:
    _, _, end = one_comes_and_is_killed(
        tmp_path, "accelerate", front="accelerate", steps=60, world=2
    )
    assert end["same"] and end["loaded"] == end["round"] - 1


@pytest.mark.timeout(180)
def test_a_machine_that_gets_sigterm_ends_the_round_first(tmp_path: Path) -> None:
    """With the trigger of Accelerate, as in docs/members.md."""
    one_gets_sigterm(tmp_path, "accelerate", front="accelerate")
