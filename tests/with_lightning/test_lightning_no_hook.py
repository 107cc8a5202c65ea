"""`CommHookDDP(hook=None)` is DDPStrategy: nothing in checkpoints, no error from callbacks."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_commhooks import CommHookMonitor
from tests.support.lightning_support import SAVED_AT, SEVERAL_BUCKETS_MB, assert_equal, fit, path_at


def _fits(root: str) -> dict[str, Any]:
    def plain(**options: Any) -> dict[str, Any]:
        return fit(
            root + "/plain", make=lambda: DDPStrategy(bucket_cap_mb=SEVERAL_BUCKETS_MB), **options
        )

    without: dict[str, Any] = {"hook": None, "wrapper": "bf16"}
    monitor = CommHookMonitor(every_n_steps=1)
    results = {
        "plain": plain(save=True),
        "none": fit(root, save=True, callbacks=[monitor], **without),
        "hooked": fit(root + "/hooked", save=True, epochs=2),
        # From a checkpoint of a run with a hook, and the other way round.
        "off": fit(root, ckpt_path=path_at(root + "/hooked", SAVED_AT), **without),
        "on": fit(root, ckpt_path=path_at(root + "/plain", SAVED_AT)),
    }
    saved = torch.load(path_at(root, SAVED_AT), weights_only=True)
    return {**results, "keys": set(saved)}


def test_it_trains_saves_and_resumes_as_plain_ddp(run_ranks: Any, tmp_path: Path) -> None:
    for number, rank in enumerate(run_ranks(_fits, str(tmp_path), timeout_s=100)):
        assert rank["none"]["stats"] is None and "commhooks" not in rank["keys"]
        assert_equal(rank["none"]["final"], rank["plain"]["final"])
        assert not rank["none"]["warnings"] and not rank["off"]["warnings"]
        assert rank["off"]["stats"] is None
        assert rank["on"]["start"] == [0] and rank["on"]["stats"]["compressed_steps"] > 0
        assert [
            "holds no state of a communication hook" in text for text in rank["on"]["warnings"]
        ] == [True] * (number == 0)
