"""A machine that has done its round tells the others, over their state servers."""

import time

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


def test_news_of_a_later_round_ends_the_running_one_until_an_older_state_is_loaded() -> None:
    rounds = RoundEnd(Client())
    rounds.hear(9)
    assert rounds.is_over(5)
    rounds.begin(9)
    assert rounds.is_over(9), "a fast machine has done this round already"
    rounds.begin(5)
    assert not rounds.is_over(5)
