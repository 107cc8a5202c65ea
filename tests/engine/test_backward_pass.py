"""The order in which the buckets of a backward pass take turns, with exchanges of any number of
Sends, on no ranks.

A collective is issued by being written down, and answered when it is waited for.
"""

from typing import Any

import pytest
import torch

from commhooks.compressors.base import Exchange, Send, StepInfo, Verdict
from commhooks.engine.backward_pass import BackwardPass, RunningExchange
from commhooks.engine.task import ExchangeTask

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


class Log:
    """Runs a backward pass and notes, in order, what was sent, waited for and committed."""

    def __init__(self) -> None:
        group: Any = None
        self.current = BackwardPass(group, True, 1.0, StepInfo(0, 1), 0, "0")
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

    def exchange(self, bucket: int, sends: str, finite: torch.Tensor) -> Exchange:
        """An exchange that sends as often as `sends` has letters."""
        try:
            for i, letter in enumerate(sends):
                what = f"{letter}{bucket}"
                meanwhile = lambda what=what: self.lines.append(("meanwhile", what))  # noqa: E731
                yield Send(torch.zeros(1), what=what, last=i == len(sends) - 1, meanwhile=meanwhile)
            good = yield Verdict(finite)
            self.lines.append((f"committed {bucket}", good))
        finally:
            self.lines.append(("closed", str(bucket)))
        return None

    def add(self, sends: str, finite: torch.Tensor = TRUE) -> None:
        flat = torch.zeros(1)
        bucket = len(self.current.running)
        task = ExchangeTask(self.exchange(bucket, sends, finite), flat, "mine")
        self.current.add(RunningExchange(task, flat, self.issue))

    def words(self, kind: str) -> list[Any]:
        return [what for line_kind, what in self.lines if line_kind == kind]

    @property
    def committed(self) -> list[tuple[str, Any]]:
        return [line for line in self.lines if line[0].startswith("committed")]


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_bucket_starts_and_each_earlier_one_takes_a_step(log: Log) -> None:
    after = []
    for sends in ["PQR", "PQ", "A", "PQR"]:
        log.add(sends)
        after.append(log.words("sent"))
    assert after == [
        ["P0"],
        ["P0", "P1", "Q0"],
        ["P0", "P1", "Q0", "A2", "R0", "Q1"],
        ["P0", "P1", "Q0", "A2", "R0", "Q1", "P3"],
    ]
    # The last Send of an exchange is waited for only after all buckets have sent theirs.
    assert log.words("waited") == ["P0", "Q0", "P1"]
    assert bool(log.current.drain())
    assert log.words("sent")[7:] == ["Q3", "R3"]
    assert log.words("waited") == ["P0", "Q0", "P1", "P3", "Q3", "R0", "Q1", "A2", "R3"]
    assert not log.words("closed")
    log.current.commit(True)
    assert log.words("closed") == ["0", "1", "2", "3"]


def test_work_for_the_meanwhile_is_done_between_the_start_of_a_collective_and_its_answer(
    log: Log,
) -> None:
    log.add("PQ")
    log.current.drain()
    assert log.lines == [
        (kind, what) for what in ("P0", "Q0") for kind in ("sent", "meanwhile", "waited")
    ]


def test_nothing_is_committed_before_all_have_told_whether_they_are_finite(log: Log) -> None:
    for finite in [TRUE, FALSE, TRUE]:
        log.add("PQ", finite)
    good = log.current.drain()
    assert not log.committed and not bool(good)
    log.current.commit(bool(good))
    assert log.committed == [(f"committed {bucket}", False) for bucket in range(3)]
    futures = [task.future for task in log.current.running]
    log.current.fulfil()
    assert not log.current.running and all(future.done() for future in futures)


def test_an_abandoned_pass_closes_its_exchanges(log: Log) -> None:
    for _ in range(3):
        log.add("PQ")
    log.current.abandon()
    assert log.words("closed") == ["0", "1", "2"] and not log.current.running and not log.committed
