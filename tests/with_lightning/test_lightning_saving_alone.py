"""Saves in signal handlers, where the other ranks may not take part: they communicate nothing. Those in exceptions are
in test_interrupted_trainer.py."""

import functools
import os
import signal
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from test_lightning_saving import counted_saves

from lightning_commhooks.checkpoint import CHECKPOINT_KEY, in_signal_handler
from tests.support.lightning_fits import HOOK, SAVED_AT, Slurm, fit, keeper, path_at
from tests.support.lightning_support import Model, data, strategy, trainer


class _Signals(pl.Callback):
    """Both ranks get the signal between two steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            os.kill(os.getpid(), signal.SIGUSR2)


def _slurm(root: str) -> list[bool]:
    before = signal.getsignal(signal.SIGUSR2)
    requeueing = strategy(hook=HOOK, cluster_environment=Slurm(requeue_signal=signal.SIGUSR2))
    t = trainer(root, pool=False, strategy=requeueing, max_epochs=4, callbacks=[_Signals(), keeper(root)])
    # The handler calls `scontrol requeue 1`; no matter if there is none.
    with counted_saves() as saves, mock.patch.dict(os.environ, {"SLURM_JOB_ID": "1"}):
        try:
            t.fit(Model(), data())
        finally:
            signal.signal(signal.SIGUSR2, before)
    return [each.kwargs["joint"] for each in saves.call_args_list]


def test_a_save_in_a_signal_handler_communicates_nothing(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_slurm, str(tmp_path))
    assert ranks == [[False, True, True]] * 2  # in the handler; at the ends of epochs 2 and 4
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


class _SavesByHand(pl.Callback):
    """Saves by calling the function that handles SIGTERM."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        def save(*_: Any) -> None:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.global_step}.ckpt")

        before = signal.signal(signal.SIGTERM, save)
        if trainer.global_step == SAVED_AT:
            save(signal.SIGTERM, None)
        signal.signal(signal.SIGTERM, before)


def test_what_is_no_handled_signal_saves_exactly(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(fit, str(tmp_path), epochs=4, callbacks=[_SavesByHand()])
    payload = torch.load(tmp_path / f"{SAVED_AT}.ckpt", weights_only=True)[CHECKPOINT_KEY]
    assert (payload["exact"], payload["residual"], payload["step"]) == (True, "mean", SAVED_AT)
