"""Times on an accelerator come from events that nobody waits for (here: the host's clock)."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.comm import counters
from commhooks.comm.counters import Clocks
from commhooks.gradients import precision
from tests.support.training import Run

CPU = torch.device("cpu")


class _Event:
    """Passes when the device has come that far: `device_at`, or at once."""

    device_at: float | None = None
    waits = 0

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return _Event.device_at is None or self.at <= _Event.device_at

    def synchronize(self) -> None:
        _Event.waits += 1
        assert _Event.device_at is not None or self.at <= time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return 1000 * (end.at - self.at)


@contextlib.contextmanager
def events(now: Any = time.perf_counter, device_at: float | None = None) -> Iterator[type[_Event]]:
    _Event.waits = 0
    _Event.device_at = device_at
    with (
        mock.patch.object(precision, "is_host_readable", lambda device: False),
        mock.patch.object(counters, "has_clock", lambda device: True),
        mock.patch("commhooks.hook.statistics.has_clock", lambda device: True),
        mock.patch.object(counters, "event_on", lambda device: _Event(now())),
    ):
        yield _Event


def test_what_the_device_has_not_done_is_counted_later() -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 10.0, 14.0])
    measured = Clocks()
    with events(lambda: next(times), device_at=8.0) as event:
        measured.begin_pass()
        first = measured.last_pass
        # 0 to 7, waiting from 1 to 3
        with (
            measured.measure(CPU),
            measured.measure(CPU, waiting=True),
        ):
            pass
        with measured.measure(CPU):  # 10 to 14: the device is not there yet
            pass
        assert measured.total.codec_s == 0
        measured.begin_pass()
        assert event.waits == 0
        assert (measured.total.codec_s, measured.total.waiting_s) == (5, 2)
        measured.collect(wait=True)
        assert event.waits == 2
        assert (measured.total.codec_s, measured.total.waiting_s) == (9, 2)
        assert (first.codec_s, first.waiting_s) == (9, 2)
        assert measured.last_pass.codec_s == 0


def test_the_last_answer_counts_from_the_last_call() -> None:
    times = iter([1.0, 2.0, 5.0, 6.0])
    measured = Clocks()
    with events(lambda: next(times)):
        measured.begin_pass()
        answers = [measured.left_to_ddp(CPU), measured.left_to_ddp(CPU)]  # 1, 2
        answers[0]()  # 5
        answers[1]()  # 6
        measured.begin_pass()
        assert measured.total.waiting_s == 4


def test_training_does_not_wait_for_a_thread_that_waits_for_events() -> None:
    measured = Clocks()
    waiting, go_on = threading.Event(), threading.Event()

    class Late(_Event):
        def synchronize(self) -> None:
            waiting.set()
            assert go_on.wait(60)

    measured._open.append((Late(0), Late(1), lambda seconds: None))
    reader = threading.Thread(target=measured.collect, kwargs={"wait": True})
    reader.start()
    waiting.wait()
    training = threading.Thread(target=measured.begin_pass)
    training.start()
    training.join(10)
    blocked = training.is_alive()
    go_on.set()
    reader.join(), training.join()
    assert not blocked and not measured._open


def _train(hook: str, options: dict[str, Any]) -> dict[str, Any]:
    with events() as event:
        run = Run.new(hook=hook, hook_options=options)
        began = time.perf_counter()
        run.train(5)
        wall = time.perf_counter() - began
        waits = event.waits
        return {**run.hook.stats(), "wall": wall, "waits": waits}


@pytest.mark.parametrize(
    ("hook", "options"), [("powerSGD", {"start_powerSGD_iter": 1}), ("fp16", {})]
)
def test_training_waits_for_no_event(run_ranks: Any, hook: str, options: dict[str, Any]) -> None:
    for stats in run_ranks(_train, hook, options):
        assert stats["waits"] == 0
        assert 0 < stats["codec_s_last_pass"] < stats["codec_s"]
        assert 0 < stats["waiting_s"]
        assert stats["codec_s"] + stats["waiting_s"] < stats["wall"]
