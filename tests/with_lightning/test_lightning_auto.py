"""`auto` in Lightning: it decides, and a checkpoint resumes with the decision; by strategy, and from LightningCLI's
YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_lightning_config import _cli_fit, _config

from tests.support.kinds import AUTO
from tests.support.lightning_fits import SAVED_AT, fit, path_at
from tests.support.lightning_support import assert_equal


def _fit_and_resume(root: str) -> dict[str, Any]:
    auto: dict[str, Any] = {"hook": AUTO}
    through = fit(root, **auto, save=True)
    again = fit(root, **auto, seed=99, ckpt_path=path_at(root, SAVED_AT))
    return {"through": through, "again": again}


def test_a_checkpoint_holds_the_decision(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_fit_and_resume, str(tmp_path)):
        through, again = rank["through"], rank["again"]
        assert_equal(through["final"], again["final"])
        for each in (through, again):
            assert (each["stats"]["chosen"], each["stats"]["chosen_at"]) == ("int8", 2)
        assert again["start"] == [SAVED_AT] and again["stats"]["compressed_steps"] > 0
        assert through["hook state"]["notes"]["label"] == again["hook state"]["notes"]["label"] == "int8"
        assert through["warnings"] == again["warnings"] == []


@pytest.mark.parametrize("by_class", [False, True])
def test_from_the_yaml_of_lightning_cli(run_ranks: Any, tmp_path: Path, by_class: bool) -> None:
    """Real clocks, which decide within the run."""
    options = {"quality": "close", "measure_steps": 4}
    if by_class:
        config = _config(tmp_path / "c.yaml", {"class_path": "commhooks.Auto", "init_args": options})
    else:
        config = _config(tmp_path / "c.yaml", "auto", hook_options=options)
    ranks = run_ranks(_cli_fit, str(config), str(tmp_path))
    for rank in ranks:
        assert rank["name"] == "auto" and rank["options"] == ranks[0]["options"]
        assert rank["options"]["quality"] == "close" and rank["options"]["measure_steps"] == 4
        assert rank["stats"]["chosen"] == ranks[0]["stats"]["chosen"]
        assert_equal(rank["weights"], ranks[0]["weights"])
