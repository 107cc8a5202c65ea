"""`make test-peers` compares what it should: one small case of torch, and the verdicts on made-up outcomes."""

import io
import sys
from pathlib import Path

import peers
import pytest
from explained import EXPLAINED
from peer_hooks import CONFIGS
from rich.console import Console

from tests.support import warm

CASE = "test_accumulate_gradients_no_sync_grad_is_view"


def test_a_case_of_torch_runs_with_a_hook_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("expecttest")
    monkeypatch.setattr(sys, "executable", warm.python())
    [(_, plain)] = peers.run_torch([CASE], "")
    [(_, ours)] = peers.run_torch([CASE], "allreduce")
    assert plain.outcome == ours.outcome == "passed", plain.output + ours.output
    assert plain.passes == 0
    assert ours.passes == 2  # one synchronised pass on each of two ranks


def _outcome(outcome: str, passes: int = 1) -> peers.Outcome:
    return peers.Outcome(outcome, "the output", 1.0, passes, 0)


def _compared(plain: str, ours: str, case: str = "torch test_x", passes: int = 1) -> tuple[list[str], str]:
    printed = io.StringIO()
    found = {"": {case: _outcome(plain, 0)}, "fp16_compress": {case: _outcome(ours, passes)}}
    return peers.compare(found, Console(file=printed, width=200)), printed.getvalue()


@pytest.mark.parametrize("ours", ["failed", "skipped", "timed out"])
def test_what_passes_only_without_us_is_wrong(ours: str) -> None:
    problems, printed = _compared("passed", ours)
    assert problems == [f"torch test_x with fp16_compress: {ours}"]
    assert "the output" in printed and "DIFFERS" in printed


def test_an_explained_failure_is_not_wrong_but_a_hang_is() -> None:
    case = "accelerate test_sync"
    assert _compared("passed", "failed", case)[0] == []
    assert _compared("passed", "timed out", case)[0] == [f"{case} with fp16_compress: timed out"]


def test_a_run_without_a_hook_is_wrong() -> None:
    assert _compared("passed", "passed")[0] == []
    assert _compared("passed", "passed", passes=0)[0] == ["fp16_compress: no hook ran"]


def test_explanations_are_of_cases_that_run_and_are_in_the_documentation() -> None:
    cases = {f"accelerate {case}" for case in peers.ACCELERATE} | {f"torch {case}" for case in peers.TORCH}
    assert {case for case, _ in EXPLAINED} <= cases and {hook for _, hook in EXPLAINED} <= CONFIGS.keys()
    page = Path(peers.ROOT, "docs", "reliability.md").read_text()
    for case, _ in EXPLAINED:
        assert f"`{case.partition(' ')[2]}`" in page
