"""A signal, an interrupt or another thread may come while the host waits for an accelerator."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.comm.counters import Clocks
from commhooks.engine.state import HeldState
from tests.support.ddp_steps import batch, mlp, process_group_of_one
from tests.support.inside import session_of
from tests.support.models import masks

pytestmark = pytest.mark.timeout(60)


class Training:
    """Single steps of a small model, on what is taken for an accelerator."""

    def __init__(self, start: int = 0) -> None:
        self.ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.001)
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": start}
        self.hook = commhooks.attach(self.ddp, "powerSGD", hook_options=options)

    def step(self, steps: int = 1) -> None:
        for number in range(steps):
            self.ddp.zero_grad()
            self.ddp(batch(number)).square().mean().backward()

    def while_waiting(self, event: Callable[[], Any]) -> None:
        """Let `event` happen when the host has the device's answer and has not used it yet."""
        held = session_of(self.hook).held
        good, *rest = held._unread
        held._unread = (_Verdict(good, event), *rest)


class _Verdict:
    def __init__(self, good: torch.Tensor, event: Callable[[], Any]) -> None:
        self._good = good
        self._event = event

    def item(self) -> int:
        self._event()
        return int(self._good.item())

    def __radd__(self, other: torch.Tensor) -> torch.Tensor:
        return self._good + other

    __add__ = __radd__


@contextlib.contextmanager
def handler(function: Callable[..., None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, function)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[None]:
    with process_group_of_one(), masks():
        yield


def test_a_handler_may_save_while_the_host_waits() -> None:
    training = Training()
    saved = []
    training.step(5)
    training.while_waiting(lambda: signal.raise_signal(signal.SIGUSR1))

    def save(*_: Any) -> None:
        held = session_of(training.hook).held
        held._unread = (held._unread[0]._good, *held._unread[1:])
        saved.append(training.hook.state_dict(joint=False))

    with handler(save):
        assert training.hook.stats()["step"] == 5
    assert saved[0]["step"] == 5 and saved[0]["exact"]
    assert training.hook.stats()["compressed_steps"] == 5


def test_a_handler_that_comes_in_the_middle_of_the_counting_is_told_so() -> None:
    """A save in it would hold the step of one pass and the counters of another."""
    training = Training()
    seen = []
    training.step(2)
    held = session_of(training.hook).held

    class Interrupted(type(held.state)):
        def __setattr__(self, name: str, value: Any) -> None:
            seen.append(held.in_commit)
            super().__setattr__(name, value)

    held.state.__class__ = Interrupted
    assert training.hook.stats()["step"] == 2
    assert seen and all(seen) and not held.in_commit


def test_an_interrupt_while_the_host_waits_loses_no_step() -> None:
    training = Training()
    came = []
    training.step(5)

    def interrupt() -> None:
        if not came:
            came.append(True)
            raise KeyboardInterrupt

    training.while_waiting(interrupt)
    with pytest.raises(KeyboardInterrupt):
        training.hook.stats()
    training.step(2)
    assert training.hook.stats()["step"] == 7 and training.hook.state_dict()["exact"]


def test_a_pass_waits_for_a_thread_that_counts_steps() -> None:
    """Otherwise this rank would send something else in the pass in which compression begins."""
    training = Training(start=5)
    waiting = threading.Event()
    go_on = threading.Event()
    training.step(5)
    count = HeldState._count

    def slowly(self: HeldState, *arguments: Any) -> None:
        self._unread = None
        waiting.set()
        go_on.wait(1)
        count(self, *arguments)

    with mock.patch.object(HeldState, "_count", slowly):
        saver = threading.Thread(target=training.hook.state_dict, kwargs={"joint": False})
        saver.start()
        waiting.wait()
        training.step()
        go_on.set()
        saver.join()
        assert training.hook.stats()["compressed_steps"] == 1


def test_a_handler_may_ask_for_times() -> None:
    class Event:
        def __init__(self, at: float, ask: bool = False) -> None:
            self.at = at
            self.ask = ask

        def synchronize(self) -> None:
            if self.ask:
                self.ask = False
                signal.raise_signal(signal.SIGUSR1)

        def elapsed_time(self, end: "Event") -> float:
            return 1000 * (end.at - self.at)

    clocks = Clocks()
    counted = []
    for begin in (0.0, 10.0):
        clocks._open.append(
            (Event(begin), Event(begin + 1 + begin, ask=begin == 0), counted.append)
        )

    def ask(*_: Any) -> None:
        clocks.collect(wait=True)
        clocks._open.append((Event(0), Event(3), counted.append))

    with handler(ask):
        clocks.collect(wait=True)
    assert counted == [1, 11, 3]
