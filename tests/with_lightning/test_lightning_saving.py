"""A Trainer saves the hook once, in full checkpoints, with `save_residual` as set."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from commhooks import CommHook, HookConfigError
from lightning_commhooks import CommHookCheckpoint
from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from tests.support.lightning_support import (
    HOOK,
    SAVED_AT,
    STEPS_PER_EPOCH,
    Model,
    Watch,
    data,
    fit,
    keeper,
    path_at,
    strategy,
    trainer,
)
from tests.support.workers import RanksFailed


def _named_paths(root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    best = ModelCheckpoint(
        root, filename="best", monitor="epoch_as_float", mode="max", save_last=True
    )

    class Logs(Model):
        def on_train_epoch_end(self) -> None:
            self.log("epoch_as_float", float(self.current_epoch))

    watch = Watch()
    t = trainer(root, strategy=strategy(hook=HOOK), max_epochs=2, callbacks=[best, watch])
    t.fit(Logs(), data())
    t.save_checkpoint(os.path.join(root, "hpc_ckpt_1.ckpt"))
    t.fit_loop.max_epochs = 3
    t.fit(Logs(seed=1), data(), ckpt_path="best")
    out["best"] = watch.start_steps[-1]
    for name in ("last", "hpc"):
        watch = Watch()
        again = ModelCheckpoint(
            root, filename="best", monitor="epoch_as_float", mode="max", save_last=True
        )
        t = trainer(root, strategy=strategy(hook=HOOK), max_epochs=4, callbacks=[again, watch])
        t.fit(Logs(seed=1), data(), ckpt_path=name)
        out[name] = watch.start_steps
    return out


def test_best_last_and_hpc_checkpoints_hold_the_state(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_named_paths, str(tmp_path)):
        assert rank["best"] == SAVED_AT
        # saved by the fit that resumed from "best"
        assert rank["last"] == [SAVED_AT + STEPS_PER_EPOCH]
        assert rank["hpc"] == [SAVED_AT]


def _count_states(root: str) -> dict[str, Any]:
    explicit = CommHookCheckpoint(save_residual="per_rank")
    t = trainer(
        root, strategy=strategy(hook=HOOK), max_epochs=2, callbacks=[keeper(root), explicit]
    )
    with mock.patch.object(
        CommHook, "state_dict", autospec=True, side_effect=CommHook.state_dict
    ) as saves:
        t.fit(Model(), data())
        full = saves.call_count
        t.save_checkpoint(os.path.join(root, "weights.ckpt"), weights_only=True)
        t.validate(Model(), data(), verbose=False)
        t.save_checkpoint(os.path.join(root, "other-module.ckpt"))
    ours = [callback for callback in t.callbacks if isinstance(callback, CommHookCheckpoint)]
    return {
        "full": full,
        "all": saves.call_count,
        "callbacks": len(ours),
        "first": ours[0] is explicit,
    }


def test_state_is_saved_once_and_in_full_checkpoints_only(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_count_states, str(tmp_path)):
        assert rank == {"full": 1, "all": 1, "callbacks": 1, "first": True}
    full = torch.load(path_at(tmp_path, SAVED_AT), weights_only=True)
    payload = full.pop(CHECKPOINT_KEY)
    assert (
        payload["exact"] is True
        and payload["residual"] == "per_rank"
        and payload["residual_ranks"] == [0, 1]
    )
    entry = payload["parameters"]["net.2.weight"]
    assert [residual.shape for residual in entry["residual"]] == [(32, 32), (32, 32)]
    assert not torch.equal(*entry["residual"])
    assert "residual" not in str(full.keys()) + str(
        full["callbacks"].keys()
    ) and "CommHook" not in str(full)
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    # The hook's memory belongs to the module that was trained, not to one that was looked at
    # afterwards.
    assert CHECKPOINT_KEY not in torch.load(tmp_path / "other-module.ckpt", weights_only=True)


def _saves(root: str, **options: Any) -> Any:
    fit(root, save=True, epochs=2, **options)
    return torch.load(path_at(root, SAVED_AT), weights_only=True)[CHECKPOINT_KEY]["residual"]


@pytest.mark.parametrize(
    ("on_strategy", "on_callback", "saved"),
    [
        ({"save_residual": "drop"}, None, "none"),
        ({}, {"save_residual": "drop"}, "none"),
        (
            {"save_residual": "per_rank", "strict": True},
            {"save_residual": "per_rank", "strict": True},
            "per_rank",
        ),
    ],
)
def test_settings_may_be_on_strategy_or_callback(
    run_ranks: Any,
    tmp_path: Path,
    on_strategy: dict[str, Any],
    on_callback: dict[str, Any] | None,
    saved: str,
) -> None:
    callbacks = [] if on_callback is None else [CommHookCheckpoint(**on_callback)]
    assert run_ranks(_saves, str(tmp_path), callbacks=callbacks, **on_strategy) == [saved, saved]


@pytest.mark.parametrize(
    ("on_strategy", "callbacks", "text"),
    [
        (
            {"save_residual": "mean"},
            [CommHookCheckpoint(save_residual="drop")],
            (
                r"CommHookDDP\(save_residual='mean'\) and"
                r" CommHookCheckpoint\(save_residual='drop'\) contradict"
            ),
        ),
        (
            {"strict": False},
            [CommHookCheckpoint(strict=True)],
            (
                r"CommHookDDP\(strict=False\) and CommHookCheckpoint\(strict=True\) contradict each"
                r" other; set strict in"
            ),
        ),
        (
            {},
            [CommHookCheckpoint(), CommHookCheckpoint()],
            "2 CommHookCheckpoint callbacks in one Trainer",
        ),
    ],
)
def test_contradicting_settings_are_refused(
    run_ranks: Any, tmp_path: Path, on_strategy: dict[str, Any], callbacks: Any, text: str
) -> None:
    with pytest.raises(RanksFailed, match=text):
        run_ranks(_saves, str(tmp_path), callbacks=callbacks, **on_strategy)


def test_wrong_settings_of_the_callback_are_refused() -> None:
    with pytest.raises(
        HookConfigError, match="save_residual='men'; expected one of 'mean'.* .did you mean 'mean'"
    ):
        CommHookCheckpoint(save_residual="men")  # type: ignore[arg-type]
    with pytest.raises(HookConfigError, match="strict='perhaps'; expected True or False"):
        CommHookCheckpoint(strict="perhaps")  # type: ignore[arg-type]


def _callback_without_our_strategy(root: str) -> Any:
    return fit(root, epochs=1, make=DDPStrategy, callbacks=[CommHookCheckpoint()])["warnings"]


def test_the_callback_with_another_strategy_is_warned_about(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_callback_without_our_strategy, str(tmp_path))
    assert len(ranks[0]) == 1 and "nothing to save" in ranks[0][0] and "DDPStrategy" in ranks[0][0]


def _large(root: str) -> list[str]:
    with mock.patch("lightning_commhooks.strategy.PER_RANK_WARNING_BYTES", 1000):
        return fit(root, save=True, save_residual="per_rank")["warnings"]


def test_large_per_rank_checkpoints_are_warned_about_once(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_large, str(tmp_path))
    assert len(ranks[0]) == 1 and "save_residual='mean' needs one copy" in ranks[0][0]
    assert ranks[1] == []
