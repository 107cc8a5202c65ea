"""A machine that has done its round tells the others, over their state servers."""

import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest

from commhooks.members.client import Client
from commhooks.members.round_end import RoundEnd
from commhooks.members.state_server import StateServer


def _wait_for(done: object, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_others_know_that_a_machine_has_done_its_round() -> None:
    """Also one that did not answer at first. The next round is not over."""
    own, other, late = RoundEnd(Client()), RoundEnd(Client()), RoundEnd(Client())
    server = StateServer("127.0.0.1", lambda: 1.0, dict, ended=other.hear)
    port_of_late = StateServer("127.0.0.1", lambda: 1.0, dict, ended=late.hear)
    port_of_late.close()
    own.begin(3)
    own.tell([server.address, port_of_late.address], 3)
    _wait_for(lambda: other.is_over(3))
    assert not other.is_over(4) and not own.is_over(3) and not late.is_over(3)
    own.begin(4)  # ends the thread
    server.close()


def test_machines_that_come_by_themselves_are_not_told() -> None:
    own, other = RoundEnd(Client()), RoundEnd(Client())
    server = StateServer("127.0.0.1", lambda: 1.0, dict, ended=other.hear)
    own.begin(3)
    met = threading.Event()
    own._stopped = mock.Mock(wait=lambda seconds: met.wait(), is_set=lambda: False)
    before = _telling()
    own.tell([server.address], 3)
    (telling,) = _telling() - before
    own.begin(4)  # they have met
    met.set()
    telling.join(30.0)
    assert not telling.is_alive()
    server.close()
    assert not other.is_over(3)


def _telling() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "commhooks round end"}


def test_a_machine_that_has_ended_tells_nobody() -> None:
    """Not even one that has not answered so far."""
    own = RoundEnd(Client())
    server = StateServer("127.0.0.1", lambda: 1.0, dict)
    server.close()
    own.begin(3)
    before = _telling()
    own.tell([server.address], 3)
    (telling,) = _telling() - before
    own.close()
    telling.join(30.0)
    assert not telling.is_alive()


def test_news_of_a_later_round_ends_the_running_one_until_an_older_state_is_loaded() -> None:
    rounds = RoundEnd(Client())
    rounds.hear(9)
    assert rounds.is_over(5)
    rounds.begin(9)
    assert rounds.is_over(9), "a fast machine has done this round already"
    rounds.begin(5)
    assert not rounds.is_over(5)


class _News(threading.Event):
    """Does not wait, but notes for how long it should, and calls `meanwhile`."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.waits = list[float | None]()
        self._meanwhile = meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        self._meanwhile()
        return self.is_set()


@pytest.mark.parametrize(
    ("left_s", "weight", "waits"),
    [
        (0.05, 0.1, True),
        (0.4, 0.1, True),
        (0.6, 0.1, False),  # the next step ends before
        (0.4, 0.5, False),  # to wait would lose more than the other machine loses
        (0.2, 0.5, True),
        (-0.02, 0.1, True),  # it must come at any moment
        (0.05, 1.0, False),
    ],
)
def test_a_slow_machine_waits_for_the_end_rather_than_to_begin_a_step_that_ends_after_it(
    left_s: float, weight: float, waits: bool
) -> None:
    """If another machine has ended its latest round of this kind; once, and for no longer than a
    step takes.
    """
    now = 0.0
    rounds = RoundEnd(Client(), clock=lambda: now)
    news = rounds._news = _News(lambda: rounds.hear(2))
    rounds.begin(0)
    now = 1.0 + left_s
    rounds.hear(0)
    assert rounds.ends_here(0, weight)
    rounds.begin(2)
    now += 0.5  # a step
    assert not rounds.ends_here(2, weight)
    now += 0.5
    assert rounds.ends_here(2, weight) is waits
    assert news.waits == [pytest.approx(0.5)] * waits
    # One that has done its round itself does not wait in the next one, as with equal machines.
    rounds.begin(4)
    rounds.hear(4)
    rounds.begin(6)
    now += left_s + 1.0
    assert not rounds.ends_here(6, 0.1) and len(news.waits) == waits


def test_a_machine_waits_for_an_end_that_does_not_come_once_for_as_long_as_a_step_takes() -> None:
    now = 0.0
    rounds = RoundEnd(Client(), clock=lambda: now)
    news = rounds._news = _News()
    rounds.begin(0)
    rounds.hear(0)
    assert rounds.ends_here(0, 0.1)
    rounds.begin(2)
    for _ in range(3):
        now += 0.25
        assert not rounds.ends_here(2, 0.1)
    assert news.waits == [0.25]
