"""The times of watched passes, by a clock that the test sets."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from commhooks.compressors.adaptive import ObservedPass, Watch
from commhooks.compressors.auto.compressor import AutoCompressor
from commhooks.compressors.auto.decision import Decision
from commhooks.compressors.auto.options import Auto
from commhooks.compressors.candidates import ALLREDUCE
from commhooks.engine import observer as module
from commhooks.engine.observer import Observer
from commhooks.gradients.layout import read_layout
from commhooks.gradients.names import ModelNames

CPU = torch.device("cpu")
NAMES = ("a", "b")
PARAMETERS = {name: nn.Parameter(torch.zeros(4)) for name in NAMES}


class Clock:
    """`mark` returns the time that was set."""

    now = 0.0

    def mark(self, device: torch.device) -> float:
        return self.now


class Looks(AutoCompressor):
    """A compressor that is shown passes, and takes two seconds to look at each."""

    def __init__(self, clock: Clock, watch: Watch) -> None:
        super().__init__(Auto(), decision=Decision(ALLREDUCE, watch))
        self.clock, self.seen = clock, []  # type: ignore[var-annotated]

    def observe(self, seen: ObservedPass) -> None:
        self.seen.append((seen.step_s, [layout.names for layout in seen.layouts]))
        self.clock.now += 2.0


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    between = mock.patch.object(module, "seconds_between", lambda first, second: second - first)
    with mock.patch.object(module, "mark", made.mark), between:
        yield made


class Training:
    """Passes of two buckets that take five seconds."""

    def __init__(self, clock: Clock, watch: Watch) -> None:
        self.clock, self.step = clock, 0
        self.shown = Looks(clock, watch)
        self.observer = Observer(ModelNames(PARAMETERS.items()))

    def run(self, good: bool = True) -> None:
        self.observer.begin_pass(self.step, self.shown)
        for name in NAMES:
            self.observer.add(read_layout(torch.zeros(4), [PARAMETERS[name]], [name]))
        self.clock.now += 5.0
        if self.observer.active:
            self.observer.show(self.step, torch.tensor(good), torch.device("cpu"))
        self.step += good


def test_times_and_what_is_no_part_of_them(clock: Clock) -> None:
    training = Training(clock, Watch(0, 9))
    for _ in range(3):
        training.run()
    # The first pass follows none that was measured. What was done after a pass to look at it is not in the next step.
    assert training.shown.seen == [(5.0, [["a"], ["b"]])] * 2


@pytest.mark.parametrize("good", [True, False])
def test_only_the_steps_of_the_watch_are_shown(clock: Clock, good: bool) -> None:
    """Step 2 is the beginning of the clock, also if it takes two passes."""
    training = Training(clock, Watch(3, 9))
    for number in range(5 if good else 6):
        training.run(good=good or number != 2)
    assert len(training.shown.seen) == 2  # steps 3 and 4


def test_a_pass_that_was_not_committed_is_not_shown(clock: Clock) -> None:
    training = Training(clock, Watch(0, 9))
    training.run()
    training.run(good=False)
    assert training.shown.seen == []
    training.run()
    assert len(training.shown.seen) == 1
