"""Saves in exceptions and signal handlers, where the other ranks may not take part: they communicate nothing."""

from __future__ import annotations

import enum
import functools
import os
import signal
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from commhooks import CommHook
from lightning_commhooks.checkpoint import CHECKPOINT_KEY, in_signal_handler
from tests.support.lightning_fits import HOOK, SAVED_AT, Slurm, fit, keeper, path_at
from tests.support.lightning_support import Model, assert_equal, data, strategy, trainer


class _Breaks(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == SAVED_AT:
            raise RuntimeError("broken on purpose")
        return self.loss(batch)


def _exception(root: str) -> dict[str, Any]:
    callbacks = [OnExceptionCheckpoint(root, filename="broken")]
    # OnExceptionCheckpoint removes its file in teardown, which an exception never reaches.
    with pytest.raises(RuntimeError, match="broken on purpose"):
        fit(root, epochs=4, model=_Breaks(), callbacks=callbacks)
    path = os.path.join(root, "broken.ckpt")
    return fit(root, ckpt_path=path, seed=1, epochs=4)


def test_a_save_in_an_exception_communicates_nothing(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_exception, str(tmp_path))
    payload = torch.load(tmp_path / "broken.ckpt", weights_only=True)[CHECKPOINT_KEY]
    assert (payload["exact"], payload["residual"], payload["step"]) == (False, "none", SAVED_AT)
    assert payload["parameters"]["net.2.weight"]["q"] is not None
    for rank in ranks:
        assert rank["start"] == [SAVED_AT]
        assert_equal(rank["final"], ranks[0]["final"])
    assert any("marked inexact" in warning for warning in ranks[0]["warnings"])


class _Signals(pl.Callback):
    """Both ranks get the signal between two steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            os.kill(os.getpid(), signal.SIGUSR2)


def _slurm(root: str) -> dict[str, Any]:
    os.environ["SLURM_JOB_ID"] = "1"  # the handler calls `scontrol requeue 1`; no matter if there is none
    before = signal.getsignal(signal.SIGUSR2)
    calls: list[bool] = []
    original = CommHook.state_dict

    def noted(self: CommHook, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["joint"])
        return original(self, *args, **kwargs)

    CommHook.state_dict = noted  # type: ignore[method-assign]
    try:
        t = trainer(
            root,
            strategy=strategy(hook=HOOK, cluster_environment=Slurm(requeue_signal=signal.SIGUSR2)),
            max_epochs=4,
            callbacks=[_Signals(), keeper(root)],
            pool=False,
        )
        t.fit(Model(), data())
    finally:
        CommHook.state_dict = original  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR2, before)
        del os.environ["SLURM_JOB_ID"]
    return {"joint": calls}


def test_a_save_in_a_signal_handler_communicates_nothing(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_slurm, str(tmp_path))
    for rank in ranks:
        assert rank["joint"] == [False, True, True]  # in the handler; at the ends of epochs 2 and 4
    payload = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)[CHECKPOINT_KEY]
    assert (payload["exact"], payload["residual"], payload["step"]) == (False, "none", SAVED_AT)
    assert torch.load(path_at(tmp_path, SAVED_AT), weights_only=True)[CHECKPOINT_KEY]["exact"] is True


class _Kept:
    """Something that a caller holds in a variable."""


def test_looking_for_a_handler_keeps_nothing_of_the_callers_alive() -> None:
    def sweep(first: int, second: int) -> bool:
        kept = _Kept()
        weak = weakref.ref(kept)
        in_signal_handler()
        del kept
        return weak() is None

    assert sweep(1, 2)


def test_signal_handlers_of_every_kind_are_known() -> None:
    seen: list[bool] = []

    def plain(*_: Any) -> None:
        seen.append(in_signal_handler())

    class Object:
        def __call__(self, *_: Any) -> None:
            seen.append(in_signal_handler())

        def method(self, *_: Any) -> None:
            seen.append(in_signal_handler())

    def once(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        plain()

    before = signal.getsignal(signal.SIGUSR2)
    try:
        for handler in (plain, Object(), Object().method, functools.partial(plain, 1), once):
            assert not in_signal_handler()
            signal.signal(signal.SIGUSR2, handler)
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert seen == [True] * 5


class _Saving(enum.Enum):
    """Looking up a member runs `Enum.__call__`, whose code the default handler has, too."""

    DONE = 1

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        value()
        return cls.DONE


class _SavesByHand(pl.Callback):
    """Saves by calling the function that handles SIGTERM, and within a look-up in an Enum."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        def save(*_: Any) -> None:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.global_step}.ckpt")

        before = signal.signal(signal.SIGTERM, save)
        try:
            if trainer.global_step == SAVED_AT:
                save(signal.SIGTERM, None)
            if trainer.global_step == SAVED_AT + 1:
                _Saving(save)
        finally:
            signal.signal(signal.SIGTERM, before)


def test_what_is_no_handled_signal_saves_exactly(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(fit, str(tmp_path), epochs=4, callbacks=[_SavesByHand()])
    for step in (SAVED_AT, SAVED_AT + 1):
        payload = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)[CHECKPOINT_KEY]
        assert (payload["exact"], payload["residual"], payload["step"]) == (True, "mean", step)
