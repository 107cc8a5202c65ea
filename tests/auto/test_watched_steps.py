"""The times of the steps that `auto` watches, by a clock that the test sets."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from commhooks.auto import watch as watched
from commhooks.auto.compressor import AutoCompressor
from commhooks.auto.watch import ObservedPass
from tests.support.cuda_stand_ins import Event, cuda_stand_ins
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
            mock.patch.object(watched, "mark", lambda _: made.now),
            mock.patch.object(watched, "seconds_between", lambda first, second: second - first),
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


@pytest.mark.parametrize("finished", [True, False])
def test_on_cuda_the_host_waits_for_no_watched_pass(finished: bool) -> None:
    """`finished`: whether the device keeps up. If not, the times are read where the decision is
    due.
    """
    shown: list[int] = []
    with (
        process_group_of_one(),
        cuda_stand_ins() as cuda,
        mock.patch.object(Event, "query", lambda _: finished),
        mock.patch.object(
            AutoCompressor, "observe", lambda _, seen: shown.append(len(seen.layouts))
        ),
    ):
        run = Run.new(hook="auto", hook_options={"measure_steps": 9})
        waits, so_far = [], []
        for _ in range(10):
            loss = run.ddp(torch.ones(8, 1, 8, 8)).square().sum()
            before = sum(map(len, cuda.host_waits.values()))
            loss.backward()
            waits.append(sum(map(len, cuda.host_waits.values())) - before)
            so_far.append(len(shown))
    # steps 2 to 8 are watched; with pass 9 it decides
    assert waits[1:9] == [0] * 8 and waits[9] > 0
    assert (
        so_far[:9] == [max(0, step - 1) if finished else 0 for step in range(9)]
        and so_far[9] == 7 + finished
    )
