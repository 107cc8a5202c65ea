"""Lightning's emergency checkpoints hold a hook's state after exceptions, Ctrl-C and signals."""

import functools
import os
import signal
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from commhooks import PowerSGD
from lightning_commhooks.checkpoint import CHECKPOINT_KEY, in_signal_handler
from tests.support import lightning_support as support
from tests.support.lightning_support import (
    SAVED_AT,
    Model,
    PoolEnvironment,
    about_hooks,
    assert_equal,
    data,
    fit,
    strategy,
    trainer,
)

HOOK = PowerSGD(start_powerSGD_iter=2, matrix_approximation_rank=2)
STOPS_AT = 6  # of four steps per epoch: in the middle of the second
LIMIT_S = 60.0  # of a collective, where nobody may wait
SHORT_LIMIT_S = 4.0  # where Lightning waits for a rank that does not come


class _Slurm(PoolEnvironment, SLURMEnvironment):
    """Lightning's own requeueing signal handler on the ranks of the pool."""


class _Stops(Model):
    """Does something at a step of each rank, before or (for "requeue") in the backward pass."""

    def __init__(self, what: str, at: dict[int, int], limit_s: float) -> None:
        super().__init__()
        self.what = what
        self.at = at
        self.limit_s = limit_s
        if what == "requeue":
            self.net[2].weight.register_hook(self._signal)

    def on_train_start(self) -> None:
        """The limit and the clock begin here, because a rank may start slowly on a busy machine."""
        self.started = time.monotonic()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.limit_s), dist.group.WORLD)

    def _signal(self, gradient: torch.Tensor) -> None:
        if self._here():
            os.kill(os.getpid(), signal.SIGUSR2)

    def _here(self) -> bool:
        return self.trainer.global_step == self.at.get(dist.get_rank())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self._here():
            if self.what == "exception":
                raise RuntimeError("broken on purpose")
            if self.what == "Ctrl-C":
                raise KeyboardInterrupt
            if self.what == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(batch)


def _callback(root: str, name: str) -> pl.Callback:
    if name == "OnExceptionCheckpoint":
        return OnExceptionCheckpoint(root, filename="saved")
    return ModelCheckpoint(
        root, filename="saved", save_on_exception=name == "ModelCheckpoint", every_n_epochs=100
    )


def _interrupted(
    root: str, what: str, at: dict[int, int], limit_s: float, callback: str = "none"
) -> Any:
    """Return the error that ended the run on this rank, the seconds, and the hook's warnings."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(os.path.join(root, "store"), 2),
        rank=_first_come(root),
        world_size=2,
        timeout=timedelta(seconds=LIMIT_S),
    )
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    }
    options: dict[str, Any] = {"bucket_cap_mb": support.SEVERAL_BUCKETS_MB}
    if what == "requeue":
        options["cluster_environment"] = _Slurm(requeue_signal=signal.SIGUSR2)
    t = trainer(
        root,
        pool=what != "requeue",
        strategy=strategy(hook=HOOK, **options),
        max_epochs=4,
        callbacks=[_callback(root, callback)],
    )
    error = ""
    # The handler ends with `scontrol requeue 1`.
    job = {"SLURM_JOB_ID": "1"} if what == "requeue" else {}
    model = _Stops(what, at, limit_s)
    with support.caught_warnings() as texts, mock.patch.dict(os.environ, job):
        try:
            t.fit(model, data())
        except BaseException as caught:  # also SystemExit, of which SIGTERMException is one
            error = type(caught).__name__
        finally:
            seconds = time.monotonic() - model.started
            for number, handler in handlers.items():
                signal.signal(number, handler)
            dist.destroy_process_group()  # as the end of the process would
    return {"error": error, "seconds": seconds, "warnings": about_hooks(texts)}


def _first_come(root: str) -> int:
    """A rank for a group of our own, whose time-out is short."""
    try:
        os.close(os.open(os.path.join(root, "first"), os.O_CREAT | os.O_EXCL))
        return 0
    except FileExistsError:
        return 1


def _check_saved_and_resumed(run_ranks: Any, path: Path, step: int) -> None:
    checkpoint = torch.load(path, weights_only=True)
    payload = checkpoint[CHECKPOINT_KEY]
    assert checkpoint["global_step"] == payload["step"] == step
    assert (payload["exact"], payload["residual"]) == (False, "none")
    assert payload["parameters"]["net.2.weight"]["q"] is not None
    ranks = run_ranks(fit, str(path.parent), ckpt_path=str(path), seed=1, hook=HOOK)
    for rank in ranks:
        assert rank["start"] == [step] and rank["stats"]["step"] == 16
        assert_equal(rank["final"], ranks[0]["final"])
    (warning,) = [text for rank in ranks for text in rank["warnings"]]
    assert "residuals of zero" in warning


EVERY = {0: STOPS_AT, 1: STOPS_AT}


@pytest.mark.parametrize(
    ("what", "at", "callback", "error"),
    [
        ("Ctrl-C", EVERY, "OnExceptionCheckpoint", "SystemExit"),
        ("SIGTERM", EVERY, "ModelCheckpoint", "SIGTERMException"),
        # Lightning itself lets the ranks meet after the save. One that does not come is waited for.
        ("exception", {1: STOPS_AT}, "ModelCheckpoint", None),
        ("SIGTERM", {0: STOPS_AT}, "OnExceptionCheckpoint", None),
    ],
)
def test_what_ends_a_training_leaves_a_checkpoint_that_resumes(
    run_ranks: Any, tmp_path: Path, what: str, at: dict[int, int], callback: str, error: str | None
) -> None:
    limit_s = SHORT_LIMIT_S if error is None else LIMIT_S
    ranks = run_ranks(_interrupted, str(tmp_path), what, at, limit_s, callback, init=False)
    for rank in ranks:
        assert rank["error"] and error in (None, rank["error"])
        assert rank["seconds"] < (2 * limit_s + 5 if error is None else limit_s)
    (warning,) = [text for rank in ranks for text in rank["warnings"]]
    assert "is marked inexact" in warning
    # Lightning looks for SIGTERM at the end of a batch.
    step = STOPS_AT + 1 if what == "SIGTERM" and error is not None else STOPS_AT
    _check_saved_and_resumed(run_ranks, tmp_path / "saved.ckpt", step)


def test_the_requeue_signal_at_different_steps_and_in_mid_backward(
    run_ranks: Any, tmp_path: Path
) -> None:
    at = {0: STOPS_AT, 1: STOPS_AT + 1}
    for rank in run_ranks(_interrupted, str(tmp_path), "requeue", at, SHORT_LIMIT_S, init=False):
        assert rank["seconds"] < 2 * SHORT_LIMIT_S + 5
    _check_saved_and_resumed(run_ranks, tmp_path / "hpc_ckpt_1.ckpt", STOPS_AT)


# ---- is this a signal handler? -------------------------------------------------------------------


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
