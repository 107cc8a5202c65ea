"""The times of watched passes, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from commhooks.comm.counters import Counters
from commhooks.compressors.observation import Watch
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


class Rehearses:
    """A compressor that is shown passes, and takes two seconds to look at each."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seen = clock, []  # type: ignore[var-annotated]

    def observe(self, seen: Any) -> None:
        self.seen.append((seen.step_s, seen.waiting_s, seen.computing_s, len(seen.gradients)))
        self.clock.now += 2.0


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    between = mock.patch.object(module, "seconds_between", lambda first, second: second - first)
    with mock.patch.object(module, "mark", made.mark), between:
        yield made


class Training:
    """Passes of two buckets: 3 s before the first, 1 s between them; 0.5 s in each hook call, 0.25 s waiting."""

    def __init__(self, clock: Clock, watch: Watch) -> None:
        self.clock, self.watch, self.step = clock, watch, 0
        counters = Counters()
        counters.clocks = mock.Mock()
        counters.clocks.last_pass.waiting_s = 0.25
        self.observer = Observer(ModelNames(PARAMETERS.items()), counters)
        self.shown = Rehearses(clock)

    def run(self, good: bool = True, buckets: int = 2) -> None:
        observer, clock, flat = self.observer, self.clock, torch.zeros(4)
        for number, name in enumerate(NAMES[:buckets]):
            clock.now += 1.0 if number else 3.0
            observer.entered(CPU)
            if number == 0:
                observer.begin_pass(self.step, self.watch)
            observer.add(read_layout(flat, [PARAMETERS[name]], [name]))
            clock.now += 0.5
            if number == buckets - 1 and observer.active:
                results = [flat] * 2
                observer.show(self.shown, self.step, torch.tensor(good), results)  # type: ignore[arg-type]
            observer.left(CPU)
        self.step += good


def test_times_and_what_is_no_part_of_them(clock: Clock) -> None:
    training = Training(clock, Watch(0, 9))
    for _ in range(3):
        training.run()
    # The first pass follows none that was measured. What the compressor rehearsed after a pass is not in the next step.
    assert training.shown.seen == [(5.0, 0.25, (3.0, 1.0), 2)] * 2


@pytest.mark.parametrize("good", [True, False])
def test_only_the_steps_of_the_watch_are_shown(clock: Clock, good: bool) -> None:
    """Step 2 is the beginning of the clock, also if it takes two passes."""
    training = Training(clock, Watch(3, 9))
    for number in range(5 if good else 6):
        training.run(good=good or number != 2)
    assert len(training.shown.seen) == 2  # steps 3 and 4


@pytest.mark.parametrize("spoiled", [{"good": False}, {"buckets": 1}])
def test_a_pass_that_was_not_committed_or_lacks_a_bucket_is_not_shown(clock: Clock, spoiled: dict[str, Any]) -> None:
    training = Training(clock, Watch(0, 9))
    training.run()
    training.run(**spoiled)
    assert training.shown.seen == []
    training.run()
    assert len(training.shown.seen) == 1
