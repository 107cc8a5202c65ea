"""`make test-peers` runs a case with and without a hook, and judges made-up outcomes rightly."""

import io
import sys
from collections import Counter
from pathlib import Path

import peers
import pytest
from peer_hooks import CONFIGS
from rich.console import Console

from tests.support import warm


def test_a_case_of_torch_runs_with_a_hook_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("expecttest")
    monkeypatch.setattr(sys, "executable", warm.python())
    case = "test_accumulate_gradients_no_sync_grad_is_view"
    for hook, passes in (("", 0), ("allreduce", 2)):  # one synchronised pass on each of two ranks
        outcomes, counted = peers.run([case], hook)
        assert (outcomes[case][0], counted) == ("passed", passes), outcomes


@pytest.mark.parametrize(
    ("case", "ours", "passes", "problems"),
    [
        ("test_x", "passed", 1, []),
        ("test_x", "passed", 0, ["fp16_compress: no hook ran"]),
        *(
            ("test_x", outcome, 1, [f"test_x with fp16_compress: {outcome}"])
            for outcome in ("failed", "skipped")
        ),
        ("test_sync", "failed", 1, []),  # explained
        ("test_sync", "timed out", 1, ["test_sync with fp16_compress: timed out"]),
    ],
)
def test_what_passes_only_without_us_is_wrong(
    case: str, ours: str, passes: int, problems: list[str]
) -> None:
    printed = io.StringIO()
    outcomes = {
        "": ({case: ("passed", "")}, 0),
        "fp16_compress": ({case: (ours, "the output")}, passes),
    }
    assert peers.compare(outcomes, Console(file=printed, width=200)) == problems
    assert ("the output" in printed.getvalue()) == any(ours in problem for problem in problems)


def test_explanations_are_of_cases_that_run_and_are_in_the_documentation() -> None:
    page = Path(peers.ROOT, "docs", "reliability.md").read_text()
    for case, hook in peers.EXPLAINED:
        assert case in peers.ACCELERATE + peers.TORCH and hook in CONFIGS and f"`{case}`" in page
    for hook, number in Counter(hook for _, hook in peers.EXPLAINED).items():
        assert f"`{hook}` ({number})" in page
