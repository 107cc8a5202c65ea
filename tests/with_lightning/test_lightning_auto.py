"""`auto` in Lightning: it decides, and a checkpoint resumes with the decision."""

from pathlib import Path
from typing import Any

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
