"""The times of the steps that `auto` watches, by a clock that the test sets."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from commhooks.compressors.adaptive import ObservedPass
from commhooks.compressors.auto.compressor import AutoCompressor
from commhooks.engine import session
from tests.support.ddp_steps import process_group_of_one
from tests.support.training import Run


class Training:
    """A step takes five seconds, and looking at it two more. Steps 2 to 8 are watched."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seen: list[tuple[int, float]] = []
        self.run = Run.new(hook="auto", hook_options={"measure_steps": 9})

    def step(self, *, finite: bool = True) -> None:
        self.now += 5.0
        if finite:
            self.run.train(1)
        else:
            self.run.ddp(torch.full((8, 1, 8, 8), float("nan"))).sum().backward()

    def observe(self, seen: ObservedPass) -> None:
        assert sum(len(layout.slots) for layout in seen.layouts) == 8
        self.seen.append((self.run.hook.stats()["step"] - 1, seen.step_s))
        self.now += 2.0


@pytest.fixture
def training() -> Iterator[Training]:
    with process_group_of_one():
        made = Training()
        with (
            mock.patch.object(session, "mark", lambda _: made.now),
            mock.patch.object(session, "seconds_between", lambda first, second: second - first),
            mock.patch.object(AutoCompressor, "observe", lambda _, seen: made.observe(seen)),
            mock.patch.object(AutoCompressor, "average", AutoCompressor.__base__.average),
        ):
            yield made


def test_only_the_steps_of_the_watch_are_shown(training: Training) -> None:
    for _ in range(5):
        training.step()
    assert training.seen == [(2, 5.0), (3, 5.0), (4, 5.0)]


def test_a_pass_that_is_not_committed_is_not_shown(training: Training) -> None:
    """Nor is the first one after a step that was not timed."""
    for number in range(6):
        training.step(finite=number not in (1, 4))
    assert training.seen == [(2, 5.0), (3, 5.0)]
