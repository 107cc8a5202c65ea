"""What `report_to` gets of the hook: the metrics of the other front ends, beside the loss."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from tests.support.accelerators import launched  # noqa: E402
from tests.support.transformers_runs import make_trainer, outcome  # noqa: E402


@launched
def _run(folder: Path, logs: Path, report_to: str, **settings: Any) -> dict[str, Any]:
    with mock.patch.dict(os.environ, {"TENSORBOARD_LOGGING_DIR": str(logs)}):
        trainer = make_trainer(folder, report_to=report_to, logging_steps=2, **settings)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return outcome(trainer) | {
        "printed": printed.getvalue(),
        "logged": {entry["step"]: entry for entry in entries},
    }


def test_report_to_gets_the_metrics_of_rank_0(run_ranks: Any, tmp_path: Path) -> None:
    # With a progress bar, which is the default, and with printed lines.
    reported, quiet = (
        run_ranks(
            _run,
            tmp_path / name,
            tmp_path / "logs" / name,
            name,
            disable_tqdm=printed,
            logging_first_step=True,
        )
        for name, printed in (("tensorboard", False), ("none", True))
    )
    first, other = reported
    assert not any("commhooks/" in key for entry in quiet[0]["logged"].values() for key in entry)
    assert not any("commhooks/" in key for entry in other["logged"].values() for key in entry)
    assert (first["weights"] == quiet[0]["weights"]).all()
    assert [entry["commhooks/compressed_steps"] for entry in first["logged"].values()] == [
        0,
        0,
        1,
        3,
        5,
    ]
    for step, entry in first["logged"].items():
        assert entry["commhooks/bytes_sent"] > 0 and entry["commhooks/gradient_norm"] > 0
        assert (entry["commhooks/compression_rate"] > 1) == (step > 2)
        assert ("commhooks/residual_over_gradient" in entry) == (step > 2)
    assert first["logged"][8]["commhooks/bytes_sent"] == first["stats"]["bytes_sent"]
    assert "'loss': " in first["printed"] and "commhooks" not in first["printed"]
    [events] = (tmp_path / "logs" / "tensorboard").glob("**/events*")
    tags = EventAccumulator(str(events)).Reload().Tags()["scalars"]
    assert {"train/loss", "train/commhooks/compression_rate", "train/commhooks/codec_ms"} <= set(
        tags
    )
