"""A machine that has done its round tells the others, over their state servers."""

import threading
import time

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
    own.tell([server.address], 3)
    own.begin(4)  # they have met
    time.sleep(0.3)
    server.close()
    assert not other.is_over(3)


def test_a_machine_that_has_ended_tells_nobody() -> None:
    """Not even one that has not answered so far."""
    own = RoundEnd(Client())
    server = StateServer("127.0.0.1", lambda: 1.0, dict)
    server.close()
    own.begin(3)
    own.tell([server.address], 3)
    telling = [thread for thread in threading.enumerate() if thread.name == "commhooks round end"]
    assert telling
    own.close()
    for thread in telling:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in telling)


def test_news_of_a_later_round_ends_the_running_one_until_an_older_state_is_loaded() -> None:
    rounds = RoundEnd(Client())
    rounds.hear(9)
    assert rounds.is_over(5)
    rounds.begin(9)
    assert rounds.is_over(9), "a fast machine has done this round already"
    rounds.begin(5)
    assert not rounds.is_over(5)


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
    rounds.begin(0)
    now = 1.0 + left_s
    rounds.hear(0)
    assert rounds.ends_here(0, weight)
    rounds.begin(2)
    now += 0.5  # a step
    assert not rounds.ends_here(2, weight)
    now += 0.5
    news = threading.Timer(0.1, rounds.hear, [2])
    news.start()
    assert rounds.ends_here(2, weight) is waits
    news.join()
    # One that has done its round itself does not wait in the next one, as with equal machines.
    rounds.begin(4)
    rounds.hear(4)
    rounds.begin(6)
    began = time.monotonic()
    now += left_s + 1.0
    assert not rounds.ends_here(6, 0.1) and time.monotonic() < began + 0.4


def test_a_machine_waits_for_an_end_that_does_not_come_once_for_as_long_as_a_step_takes() -> None:
    rounds = RoundEnd(Client())
    rounds.begin(0)
    rounds.hear(0)
    assert rounds.ends_here(0, 0.1)
    rounds.begin(2)
    waited_s = []
    for _ in range(3):
        time.sleep(0.2)
        began = time.monotonic()
        assert not rounds.ends_here(2, 0.1)
        waited_s.append(time.monotonic() - began)
    assert 0.2 <= waited_s[0] < 0.4 and max(waited_s[1:]) < 0.1, waited_s
