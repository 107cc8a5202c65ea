"""Machines that come and go, whose exchanges run behind the training (`delay`): deaths between the
beginning of an exchange and its commit, and whoever comes, leaves, hangs or saves meanwhile.
"""

import functools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine_oracle import assert_equal_weights, compare_with_oracle, train_on
from tests.support.machines import Machine, lighthouse

pytestmark = pytest.mark.timeout(120)
JOB = Path(__file__).parents[1] / "support" / "member_job.py"
GIVEN: dict[str, Any] = {"every": 4, "options": {"delay": 2, "outer_momentum": 0.5}}
SHARDED = {"world": 2, "shards": 2, "width": 7, "out": 1}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    started: list[Machine] = []
    with lighthouse() as address:

        def new(name: str, **given: Any) -> Machine:
            settings = {"wire": "int4", "steps": 10_000} | GIVEN | given
            started.append(Machine(JOB, address, tmp_path, name, **settings))
            return started[-1]

        yield new
        for machine in started:
            machine.signal(signal.SIGCONT)
            machine.kill()


def end(*machines: Machine) -> None:
    for machine in machines:
        machine.signal(signal.SIGTERM)
        assert machine.end()["what"] == "end"


def leave(machine: Machine) -> None:
    """With an exchange in flight."""
    step = max(machine.rounds, default=0)
    machine.wait_for(lambda line: line["what"] in ("sent", "round") and line["step"] > step)
    machine.signal(signal.SIGTERM)
    assert machine.end()["sent"] is True


def sent(machine: Machine) -> list[dict[str, Any]]:
    return [line for line in list(machine.lines) if line["what"] == "sent"]


STREAMING = {"options": {"fragments": 2, "delay": 1, "outer_momentum": 0.5}}
IN_TURN = {"options": {"fragments": 2, "outer_momentum": 0.5}}


@pytest.mark.parametrize(
    "given",
    [{}, SHARDED, STREAMING, SHARDED | STREAMING, IN_TURN],
    ids=["", "sharded", "fragments", "fragments, sharded", "fragments without delay"],
)
def test_the_exchange_runs_behind_the_training(start: Callable[..., Machine], given: Any) -> None:
    """Three machines, of which one comes while an exchange is in flight, and one leaves then. All
    outer steps are those of an oracle in one process, with what each machine has trained meanwhile.
    """
    start = functools.partial(start, wait_s=10.0, sleep_s=0.04, **given)
    a, b = start("a"), start("b", least=2)
    for machine in (a, b):
        machine.wait_for(lambda line: line["what"] in ("sent", "round"))
    # gloo adds three float32 in another order than the oracle, which shows in a shard
    together = "world" not in given
    if not together:
        leave(b)
    c = start("c", seed=1)
    a.wait_for(lambda line: line.get("names") == (["a", "b", "c"] if together else ["a", "c"]))
    c.round(max(a.rounds) + 3)
    if together:
        leave(b)
    a.wait_for(lambda line: line.get("part") == ["a", "c"])
    train_on(a, 8, b, c)
    end(a, c)
    compare_with_oracle([a, b, c], "int4", first="ab", **GIVEN | given)
    assert_equal_weights(a, b, c, of=["anchor"])
    behind = [line["count"] - line["sent"] for line in a.rounds.values()]
    # only with a machine that comes or leaves the training waits
    delay = (GIVEN | given)["options"].get("delay", 0)
    assert behind.count(delay) > 6 and set(behind) <= {*range(delay + 1)}, behind


@pytest.mark.parametrize(
    ("fault", "given"),
    [
        ("unsent", {}),
        ("arrived", {}),
        ("unarrived", {}),
        ("unsent", SHARDED),
        ("unsent", STREAMING),
    ],
    ids=["unsent", "arrived", "unarrived", "unsent, sharded", "unsent, fragments"],
)
def test_an_exchange_in_flight_fails(start: Callable[..., Machine], fault: str, given: Any) -> None:
    """A machine dies before it has sent its part: the others send the same differences again when
    the exchange is due. After that its part counts. Or what has arrived is lost on one machine: all
    send again. No machine loses a step.
    """
    start = functools.partial(start, timeout_s=3.0, **given)
    a, b = start("a", least=2), start("b")
    a.round(1)
    c = start("c", fault=[fault, 3])
    a.wait_for(lambda line: "c" in line.get("part", ""))
    if fault != "unarrived":
        assert c.processes[-1].wait(40) == -signal.SIGKILL
        a.wait_for(lambda line: line["what"] == "sent" and line["part"] == ["a", "b"])
    train_on(a, 5, b, c)
    end(a, b)
    c.kill()
    compare_with_oracle([a, b, c], "int4", first="ab", **GIVEN | given)
    assert_equal_weights(a, b, c, of=["anchor"])
    began = [line for line in sent(a) if line["part"] == ["a", "b", "c"]]
    last = a.rounds[began[-1]["step"] + 1]
    assert last["sent"] == began[-1]["count"] < last["count"]
    if fault != "unarrived":
        assert last["part"] == (["a", "b", "c"] if fault == "arrived" else ["a", "b"])
    log = a.log.read_text()
    assert ("failed, and the machines meet again" in log) == (fault == "unsent"), log
    counts = [line["count"] for line in a.rounds.values()]
    assert max(later - before for before, later in zip(counts, counts[1:], strict=False)) <= 4


def test_machines_of_different_speed(start: Callable[..., Machine]) -> None:
    """The slow one sends, and applies, when the fast one has come to that point."""
    given: dict[str, Any] = {"every": 12, "options": {"delay": 6}}
    fast = start("a", sleep_s=0.03, least=2, rounds=5, **given)
    slow = start("b", sleep_s=0.15, least=2, rounds=5, **given)
    assert fast.end()["step"] == slow.end()["step"] == 5
    counts = [line["count"] for line in slow.rounds.values()]
    assert counts[-1] < 5 * 8, counts
    behind = [line["count"] - line["sent"] for line in slow.rounds.values()]
    assert all(1 <= steps <= 4 for steps in behind), behind
    assert [line["count"] for line in fast.rounds.values()] == [12, 24, 36, 48, 60]
    compare_with_oracle([fast, slow], "int4", first="ab", enough=9, **given)


def test_a_machine_hangs_while_an_exchange_is_in_flight(start: Callable[..., Machine]) -> None:
    """The others commit, or send again without it, as soon as its heartbeats are missing. It finds
    itself behind when it wakes.
    """
    start = functools.partial(start, timeout_s=60.0, status_limit_s=2.0)
    a = start("a")
    a.round(1)  # so that it is not the one that comes
    b = start("b")
    b.wait_for(lambda line: line["what"] == "sent" and line["part"] == ["a", "b"])
    b.signal(signal.SIGSTOP)
    stopped = max(a.rounds, default=0)
    hung = time.monotonic()
    a.wait_for(lambda line: line.get("part") == ["a"] and line["step"] > stopped + 2)
    assert time.monotonic() - hung < 30, "a waited until timeout_s"
    b.signal(signal.SIGCONT)
    step = max(a.rounds)
    a.wait_for(lambda line: line.get("part") == ["a", "b"] and line.get("step", 0) > step + 4)
    train_on(b, 4, a)
    end(a, b)
    assert_equal_weights(a, b, of=["anchor"])
    compare_with_oracle([a, b], "int4", **GIVEN)


def test_a_save_while_an_exchange_is_in_flight(start: Callable[..., Machine]) -> None:
    """It is marked inexact, and any number of machines resume from it, with equal weights."""
    a, b = (start(name, least=2, stop_in_flight=4, save=True) for name in "ab")
    saved = [machine.wait_for(lambda line: line["what"] == "saved")["state"] for machine in (a, b)]
    for state in saved:
        assert state["step"] == 4 and not state["exact"]
    assert saved[0]["anchor"] == saved[1]["anchor"]
    assert "this save in the middle of a round is marked inexact" in a.log.read_text()
    c, d = (start(name, load="a", least=2, rounds=9) for name in "cd")
    for machine in (c, d):
        assert machine.end()["step"] == 9
    assert_equal_weights(c, d, of=["anchor"])
