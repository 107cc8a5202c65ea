"""What a rank collects during a watch: which passes count, and how much it rehearses after each."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commhooks.compressors.auto.watcher import REHEARSALS, ROUNDS, Watcher
from commhooks.compressors.observation import Rehearsal

PROBES: dict[str, Any] = {"first": SimpleNamespace(name="first"), "second": SimpleNamespace(name="second")}


@dataclass
class Pass:
    """A `Seen` whose rehearsals take as long as they are told to."""

    step_s: float = 1.0
    takes_s: float = 0.01
    bucket: str = "w"
    full: tuple[str, ...] = ()
    error: type[Exception] = torch.OutOfMemoryError
    waiting_s: float = 0.2
    computing_s: tuple[float, ...] = (0.3,)
    rehearsed: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def layouts(self) -> Any:
        return [SimpleNamespace(names=[self.bucket])]

    def rehearse(self, compressor: Any, rounds: int, look: Any = None) -> Rehearsal:
        self.rehearsed.append((compressor.name, compressor.kernel))
        if compressor.name in self.full:
            time.sleep(0.02)
            raise self.error
        return Rehearsal(self.takes_s, ROUNDS * self.takes_s)

    def plans(self, compressor: Any) -> Any:
        raise AssertionError


def _watched(*passes: Pass) -> Watcher:
    watcher = Watcher(PROBES, None)
    watcher.compute_with("of all ranks")  # type: ignore[arg-type]
    for each in passes:
        watcher.see(each)
    return watcher


def test_a_pass_with_new_buckets_is_not_counted_nor_are_those_before_it() -> None:
    report = _watched(Pass(9.0), Pass(9.0), Pass(5.0, bucket="other"), Pass(1.0, bucket="other")).report()
    assert report.passes == 1 and report.step_s == 1.0 and report.computing_s == (0.3,)


def test_rehearsals_stop_at_half_a_step_and_when_all_have_had_their_turns() -> None:
    slow, fast, further = Pass(takes_s=0.3), Pass(takes_s=0.01), Pass()
    watcher = _watched(Pass(), slow, fast, further)
    # Two rounds of 0.3 s are more than half of a step of a second.
    assert [name for name, _ in slow.rehearsed] == ["first"]
    assert len(fast.rehearsed) == REHEARSALS * len(PROBES) - 1 and not further.rehearsed
    assert {kernel for _, kernel in fast.rehearsed} == {"of all ranks"}
    report = watcher.report()
    assert report.codec_s == (0.01, 0.01)
    assert report.rehearsals == REHEARSALS
    assert math.isclose(report.spent_s, ROUNDS * (0.3 + 0.01 * len(fast.rehearsed)))


def test_steps_are_those_that_follow_no_rehearsal_if_there_are_enough() -> None:
    """In the others a rank waits for the one that rehearses longest."""
    rehearsals = REHEARSALS * len(PROBES)  # one after each of these passes
    busy = [Pass(), Pass(takes_s=0.6), *(Pass(5.0, waiting_s=4.2, takes_s=3.0) for _ in range(rehearsals))]
    report = _watched(*busy, Pass(), Pass()).report()
    assert (report.passes, report.step_s, report.waiting_s) == (rehearsals + 3, 1.0, 0.2)
    assert _watched(*busy, Pass()).report().step_s == 5.0
    assert _watched(*busy, Pass(), Pass(3.0, bucket="other"), Pass(3.0, bucket="other")).report().step_s == 3.0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_what_does_not_fit_into_memory_is_not_known(error: type[Exception]) -> None:
    """Also if it did once: one rehearsal after each of these passes."""
    slow: dict[str, Any] = {"takes_s": 0.3, "error": error}
    report = _watched(Pass(), Pass(**slow), Pass(**slow), Pass(**slow, full=("first",))).report()
    assert math.isnan(report.codec_s[0]) and report.codec_s[1] == 0.3


def test_what_fails_takes_time_too() -> None:
    failing = Pass(step_s=0.02, full=("first", "second"))
    report = _watched(Pass(), failing).report()
    assert len(failing.rehearsed) == 1 and report.spent_s >= 0.02


def test_how_often_each_probe_had_its_turn() -> None:
    slow = {"takes_s": 0.3}
    assert _watched(Pass(), Pass(**slow)).report().rehearsals == 0
    assert _watched(Pass(), Pass(**slow), Pass(**slow)).report().rehearsals == 1
