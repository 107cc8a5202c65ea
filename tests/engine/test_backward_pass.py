"""The order in which the buckets of a backward pass take turns, with exchanges of any number of rounds, on no ranks.

A collective is issued by being written down, and answered when it is waited for.
"""

from contextlib import closing
from typing import Any

import pytest
import torch

from commhooks.compressors.base import Exchange, Send, StepInfo, Verdict
from commhooks.engine.backward_pass import BackwardPass, RunningExchange
from commhooks.engine.task import ExchangeTask
from commhooks.errors import HookRunError

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


class Log:
    """What happened, in order: ("sent", "P0"), ("waited", "P0"), ("committed 0", True), ("closed", "0")."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []

    def issue(self, send: Send) -> Any:
        self.lines.append(("sent", send.what))
        log = self

        class Pending:
            def wait(self) -> torch.Tensor:
                log.lines.append(("waited", send.what))
                return send.tensor

            def writes(self, buffer: torch.Tensor) -> bool:
                return send.tensor is buffer

        return Pending()

    def exchange(self, bucket: int, rounds: str, finite: torch.Tensor = TRUE) -> Exchange:
        """One that sends as often as `rounds` has letters."""
        try:
            for i, letter in enumerate(rounds):
                yield Send(torch.zeros(1), what=f"{letter}{bucket}", last=i == len(rounds) - 1)
            good = yield Verdict(finite)
            self.lines.append((f"committed {bucket}", good))
        finally:
            self.lines.append(("closed", str(bucket)))
        return None

    def words(self, kind: str) -> list[Any]:
        return [what for each, what in self.lines if each == kind]


def _new_pass() -> BackwardPass:
    group: Any = None
    return BackwardPass(group, True, 1.0, StepInfo(0, 1), 0, "0")


def _add(current: BackwardPass, log: Log, exchange: Exchange) -> None:
    flat = torch.zeros(1)
    current.add(RunningExchange(ExchangeTask(exchange, flat, "mine"), flat, log.issue))


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_bucket_starts_and_each_earlier_one_takes_a_step(log: Log) -> None:
    current, after = _new_pass(), []
    for bucket, rounds in enumerate(["PQR", "PQ", "A", "PQR"]):
        _add(current, log, log.exchange(bucket, rounds))
        after.append(log.words("sent"))
    assert after == [
        ["P0"],
        ["P0", "P1", "Q0"],
        ["P0", "P1", "Q0", "A2", "R0", "Q1"],
        ["P0", "P1", "Q0", "A2", "R0", "Q1", "P3"],
    ]
    # Nobody waits for what an exchange sends last before all buckets have sent theirs.
    assert log.words("waited") == ["P0", "Q0", "P1"]
    assert bool(current.drain())
    assert log.words("sent")[7:] == ["Q3", "R3"]
    assert log.words("waited") == ["P0", "Q0", "P1", "P3", "Q3", "R0", "Q1", "A2", "R3"]
    assert not log.words("closed")
    current.commit(True)
    assert log.words("closed") == ["0", "1", "2", "3"]


def test_nothing_is_committed_before_all_have_told_whether_they_are_finite(log: Log) -> None:
    current = _new_pass()
    for bucket, finite in enumerate([TRUE, FALSE, TRUE]):
        _add(current, log, log.exchange(bucket, "PQ", finite))
    good = current.drain()
    assert not any(kind.startswith("committed") for kind, _ in log.lines)
    assert not bool(good)
    current.commit(bool(good))
    assert [line for line in log.lines if line[0].startswith("committed")] == [
        (f"committed {bucket}", False) for bucket in range(3)
    ]
    futures = [each.future for each in current.running]
    current.fulfil()
    assert not current.running and all(future.done() for future in futures)


def test_an_abandoned_pass_closes_its_exchanges(log: Log) -> None:
    current = _new_pass()
    kept = [log.exchange(bucket, "PQ") for bucket in range(3)]
    for exchange in kept:
        _add(current, log, exchange)
    current.abandon()
    assert log.words("closed") == ["0", "1", "2"] and not current.running
    assert not any(kind.startswith("committed") for kind, _ in log.lines)


def test_an_exchange_that_goes_on_after_its_verdict_is_told(log: Log) -> None:
    def talkative() -> Exchange:
        yield Send(torch.zeros(1), what="A", last=True)
        yield Verdict(TRUE)
        yield Verdict(TRUE)
        return None

    current = _new_pass()
    with closing(talkative()) as exchange:
        _add(current, log, exchange)
        assert bool(current.drain())
        with pytest.raises(HookRunError, match="the exchange of mine goes on after the verdict"):
            current.commit(True)
